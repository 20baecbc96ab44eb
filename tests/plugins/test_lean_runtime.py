"""NVIDIA's own lean runtime loads the library, lists its creators and creates every plugin, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.cases import all_cases
from tests.plugins.conftest import Built
from tests.plugins.lean import run_lean

pytest.importorskip("tensorrt_lean", reason="the lean TensorRT runtime is not installed (tensorrt-lean-cu13)")
pytestmark = pytest.mark.timeout(1800)


def test_lean_runtime_lists_and_creates_every_plugin(built: Built, tmp_path: Path) -> None:
    cases = [(case.plugin, dict(case.fields)) for case in all_cases(2, "cpu", 8)]
    report = run_lean(built, cases, tmp_path)
    assert sorted(report["names"]) == sorted({name for name, _ in cases})
    assert len(report["made"]) == 2 * len(cases)
    assert report["refused"]
    assert "unknown field 'no_such_field'" in report["log"]
