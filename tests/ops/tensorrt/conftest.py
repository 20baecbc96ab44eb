"""The built plugin library, and a TensorRT builder that needs no GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.plugins.conftest import built  # noqa: F401


@pytest.fixture(scope="session")
def rtx() -> Any:
    logging.getLogger("trt_redknot.tensorrt").setLevel(logging.ERROR)
    return pytest.importorskip("tensorrt_rtx", reason="the CPU-capable TensorRT is not installed (tensorrt-rtx-cu13)")
