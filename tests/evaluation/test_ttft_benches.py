"""Every bench imports, on a machine without a GPU too: what it takes from the package is there."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import benches

ROOT = Path(__file__).parents[2]
MODULES = [f"benches.{module.name}" for module in pkgutil.iter_modules([str(ROOT / "benches")])]


def test_there_are_benches() -> None:
    assert "benches.profile_prefill" in MODULES
    assert Path(next(iter(benches.__path__))) == ROOT / "benches"


@pytest.mark.parametrize("module", [*MODULES, "run.bench_ttft"])
def test_a_bench_imports(module: str) -> None:
    assert importlib.import_module(module).__doc__
