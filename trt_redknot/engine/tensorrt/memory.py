"""Device memory that an engine of the tensorrt backend needs on a rank, before anything is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, profile_ranges, shape_ranges
from trt_redknot.engine.tensorrt.specification import PlanSpec, PlanTensor
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import ElementType

_BYTES = {
    ElementType.FLOAT32: 4,
    ElementType.BFLOAT16: 2,
    ElementType.INT8: 1,
    ElementType.INT32: 4,
    ElementType.INT64: 8,
}


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes on one rank.

    Attributes:
        weights: of all layers, resident while the engine runs.
        building: inputs and outputs of the largest plan at its largest sizes, which TensorRT allocates to measure
            tactics, and its workspace.
    """

    weights: int
    building: int


def memory_need(specs: Sequence[PlanSpec], limits: PlanLimits, *, workspace_bytes: int) -> MemoryNeed:
    """Lower bounds: TensorRT's own allocations come on top."""
    return MemoryNeed(
        weights=sum(weight_bytes(spec, limits) * max(1, len(spec.kind.layers(spec.geometry))) for spec in specs),
        building=max(plan_bytes(spec, limits) for spec in specs) + workspace_bytes,
    )


def plan_bytes(spec: PlanSpec, limits: PlanLimits) -> int:
    """Inputs and outputs of a plan, weights included, at the largest sizes of the prefill profile."""
    return _bytes(spec, (*spec.inputs, *spec.outputs), limits)


def weight_bytes(spec: PlanSpec, limits: PlanLimits) -> int:
    """Weights of one layer that a plan reads."""
    return _bytes(spec, [tensor for tensor in spec.inputs if tensor.weight], limits)


def _bytes(spec: PlanSpec, tensors: Iterable[PlanTensor], limits: PlanLimits) -> int:
    ranges = profile_ranges(spec.geometry, spec.kind.stage, limits, spec.world, Phase.PREFILL)
    total = 0
    for tensor in tensors:
        found = shape_ranges(tensor.shape, ranges)
        most = tuple(size for size in tensor.shape if isinstance(size, int)) if found is None else found[-1]
        total += math.prod(most) * _BYTES[tensor.type]
    return total


def check_memory(need: MemoryNeed, free_bytes: int, gpu: str) -> None:
    """Raise EngineError where a rank's GPU is too small to build, or to hold the weights."""
    for purpose, count in (("hold this rank's weights", need.weights), ("build the largest plan", need.building)):
        if count > free_bytes:
            raise EngineError(
                f"the GPU has too little free memory to {purpose}", expected=f"at least {count:,} bytes",
                found=f"{free_bytes:,} bytes free on {gpu}",
                remedy="Use more ranks, a smaller --chunk-rows, --max-length or --workspace-gib, or free the GPU.",
            )  # fmt: skip
