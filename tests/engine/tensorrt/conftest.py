"""A TensorRT builder that needs no GPU, with our plugins cut out, and the geometries that plans are built for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.plans import cpu_platform
from trt_redknot.engine.tensorrt.platform import Platform


@pytest.fixture(scope="session")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="the CPU-capable TensorRT is not installed (tensorrt-rtx-cu13)")


@pytest.fixture(scope="session")
def platform(rtx: Any) -> Platform:
    # Inputs that only a cut plugin reads are warned about one by one.
    logging.getLogger("trt_redknot.tensorrt").setLevel(logging.ERROR)
    return cpu_platform(rtx)


@pytest.fixture
def no_tensorrt(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes an import fail as if nothing were installed."""
    import builtins
    import importlib

    def hide(name: str) -> None:
        real = importlib.import_module

        def missing(wanted: str, package: str | None = None) -> Any:
            if wanted == name:
                raise ModuleNotFoundError(f"No module named {name!r}")
            return real(wanted, package)

        monkeypatch.setattr(importlib, "import_module", missing)
        monkeypatch.delattr(builtins, name, raising=False)

    return hide
