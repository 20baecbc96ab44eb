"""The profiler of the prefill on a machine that it cannot run on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benches.profile_prefill import main
from trt_redknot.errors import EngineError


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such GPU"):
        main.main(["--output", str(tmp_path / "tables")], standalone_mode=False)
    assert not (tmp_path / "tables").exists()
