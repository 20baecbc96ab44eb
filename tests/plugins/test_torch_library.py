"""The torch adapters load and register their ops on any machine; only calling one needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.attention import seg_latent_attention
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.tables import AttentionTable


@pytest.mark.usefixtures("built")
def test_every_adapter_is_registered() -> None:
    load_kernels()
    for name in ("seg_latent_attention", "lightning_indexer", "lightning_indexer_workspace"):
        assert str(getattr(torch.ops.redknot, name).default._schema).startswith(f"redknot::{name}(")


@pytest.mark.usefixtures("built")
def test_tensors_of_the_cpu_are_refused_in_one_line() -> None:
    none = torch.zeros((0, 5), dtype=torch.int64)
    table = AttentionTable(segments=none, row_segments=none[:, :2], positions=none[:, 0], visible=none[:, 0])
    q, sinks = torch.zeros((0, 8, 512), dtype=torch.bfloat16), torch.zeros(8)
    with pytest.raises(EngineError, match="seg_latent_attention refused its inputs") as error:
        seg_latent_attention(q, q, table, q[:, 0], None, None, sinks, sinks, torch.zeros((1, 32, 2)), window=128)
    assert "\n" not in str(error.value)


def test_a_folder_without_libraries_says_how_to_build_them(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="make plugins"):
        load_kernels(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    for name in ("libredknot_kernels.so", "libredknot_torch.so"):
        (tmp_path / name).write_bytes(b"not a library")
    with pytest.raises(EngineError, match="cannot be loaded"):
        load_kernels(tmp_path)
