"""The marks of tests that run our kernels, or only load them."""

from __future__ import annotations

import pytest
import torch

from trt_redknot.ops.cuda.library import kernels_present

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels_present()),
    reason="needs a CUDA GPU and the libraries that `make plugins` builds",
)
needs_kernels = pytest.mark.skipif(not kernels_present(), reason="needs the libraries that `make plugins` builds")
