"""What an engine stores of a layer: weights that FP8 cannot hold are refused by name."""

from __future__ import annotations

import pytest
import torch

from trt_redknot.engine.weights import quantised
from trt_redknot.errors import EngineError
from trt_redknot.ops.experts import EXPERT_BLOCK


def layer() -> dict[str, torch.Tensor]:
    shape = (3, EXPERT_BLOCK, 2 * EXPERT_BLOCK)
    return {name: torch.randn(shape, dtype=torch.float64) for name in ("experts.gate_up", "experts.down")}


@pytest.mark.parametrize("name", ["experts.gate_up", "experts.down"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e300])
def test_expert_weights_that_are_no_finite_numbers_are_refused(name: str, value: float) -> None:
    tensors = layer()
    assert all(bool(tensor.float().isfinite().all()) for tensor in quantised(tensors).values())
    tensors[name][1, 5, -1] = value
    with pytest.raises(EngineError, match=rf"'{name}' cannot be stored in FP8.* 1 of 3 experts.*number 1\b"):
        quantised(tensors)
