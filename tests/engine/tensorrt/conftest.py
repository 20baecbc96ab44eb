"""A TensorRT builder that needs no GPU, with our plugins cut out."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.plans import cpu_platform
from trt_redknot.engine.tensorrt.platform import Platform


@pytest.fixture(scope="session")
def rtx() -> Any:
    # Inputs that only a cut plugin reads are warned about one by one.
    logging.getLogger("trt_redknot.tensorrt").setLevel(logging.ERROR)
    return pytest.importorskip("tensorrt_rtx", reason="the CPU-capable TensorRT is not installed (tensorrt-rtx-cu13)")


@pytest.fixture(scope="session")
def platform(rtx: Any) -> Platform:
    return cpu_platform(rtx)
