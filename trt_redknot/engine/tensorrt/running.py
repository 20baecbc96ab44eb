"""Running one plan: sizes from its inputs, addresses bound, one enqueue on the caller's stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trt_redknot.engine.tensorrt.profiles import Phase
from trt_redknot.engine.tensorrt.specification import PlanSpec, PlanTensor
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent, Size

if TYPE_CHECKING:
    import tensorrt as trt

# Bytes travel as int8; torch calls them by what they hold.
_TORCH = {
    ElementType.FLOAT32: (torch.float32,),
    ElementType.BFLOAT16: (torch.bfloat16,),
    ElementType.INT8: (torch.int8, torch.uint8, torch.float8_e4m3fn),
    ElementType.INT32: (torch.int32,),
    ElementType.INT64: (torch.int64,),
}


def bind_sizes(spec: PlanSpec, tensors: Mapping[str, torch.Tensor]) -> dict[Extent, int]:
    """Sizes of every extent, from the plan's inputs.

    Raises:
        EngineError: an input is missing, of another type or shape, empty, not contiguous, or two disagree about a size.
    """
    sizes: dict[Extent, int] = {}
    for wanted in spec.inputs:
        tensor = tensors.get(wanted.name)
        if tensor is None:
            raise EngineError(f"plan {spec.kind.name!r} lacks an input", expected=wanted.name, found=sorted(tensors))
        _check(spec, wanted, tensor, sizes)
    if Extent.ROWS in sizes and Extent.RESTORED_ROWS in sizes:
        sizes[Extent.FULL_ROWS] = full = sizes[Extent.ROWS] - sizes[Extent.RESTORED_ROWS]
        if full < 1:
            raise EngineError(
                f"plan {spec.kind.name!r} needs a row that runs all heads",
                expected=f"at most {sizes[Extent.ROWS] - 1} restored rows", found=sizes[Extent.RESTORED_ROWS],
            )  # fmt: skip
    return sizes


def empty_outputs(spec: PlanSpec, sizes: Mapping[Extent, int], device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for the plan's outputs."""
    return {
        tensor.name: torch.empty(_shape(tensor, sizes), dtype=_TORCH[tensor.type][0], device=device)
        for tensor in spec.outputs
    }


class LoadedPlan:
    """A plan with one execution context for each phase.

    Nothing here waits for the device. Inputs and outputs must live until the stream has passed the plan. Addresses and
    shapes are set before every enqueue, so that a CUDA graph captures what it will replay.
    """

    def __init__(self, spec: PlanSpec, engine: trt.ICudaEngine) -> None:
        self.spec = spec
        self._engine = engine
        self._contexts: dict[Phase, trt.IExecutionContext] = {}

    def run(
        self, phase: Phase, tensors: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], stream: int
    ) -> None:
        """Enqueue the plan.

        Args:
            tensors: inputs and weights by name, contiguous, on the device.
            outputs: where the results go (:func:`empty_outputs`).
            stream: CUDA stream handle.

        Raises:
            EngineError: a tensor does not fit, or TensorRT refuses the sizes or the enqueue.
        """
        name, context = self.spec.kind.name, self._context(phase, stream)
        sizes = bind_sizes(self.spec, tensors)
        for wanted in self.spec.inputs:
            tensor = tensors[wanted.name]
            if any(isinstance(size, Size) for size in wanted.shape) and not context.set_input_shape(
                wanted.name, tuple(tensor.shape)
            ):
                raise EngineError(
                    f"plan {name!r} was not built for this size of {wanted.name!r}",
                    expected=f"a size in the profile for {phase}", found=list(tensor.shape),
                    remedy="Build the engine with larger --chunk-rows, --max-length or --decode-rows.",
                )  # fmt: skip
            self._bind(context, wanted.name, tensor)
        for wanted in self.spec.outputs:
            output = outputs.get(wanted.name)
            if output is None:
                raise EngineError(f"plan {name!r} lacks memory for an output", expected=wanted.name)
            _check(self.spec, wanted, output, dict(sizes))
            self._bind(context, wanted.name, output)
        if not context.execute_async_v3(stream):
            raise EngineError(f"TensorRT did not enqueue plan {name!r}", remedy="The log above has TensorRT's reason.")

    def _context(self, phase: Phase, stream: int) -> trt.IExecutionContext:
        if phase not in self._contexts:
            context: trt.IExecutionContext | None = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(list(Phase).index(phase), stream):
                raise EngineError(
                    f"TensorRT made no execution context for plan {self.spec.kind.name!r}", found=phase,
                    remedy="Free device memory; the log above has TensorRT's reason.",
                )  # fmt: skip
            self._contexts[phase] = context
        return self._contexts[phase]

    def _bind(self, context: trt.IExecutionContext, name: str, tensor: torch.Tensor) -> None:
        if not context.set_tensor_address(name, tensor.data_ptr()):
            raise EngineError(f"TensorRT did not take the address of {name!r}", found=self.spec.kind.name)


def _check(spec: PlanSpec, wanted: PlanTensor, tensor: torch.Tensor, sizes: dict[Extent, int]) -> None:
    """Check one tensor, and add the sizes it brings to `sizes`."""
    shape = tuple(tensor.shape)
    if len(shape) == len(wanted.shape):
        for size, found in zip(wanted.shape, shape, strict=True):
            if isinstance(size, Size) and found > 0 and found % size.factor == 0:
                sizes.setdefault(size.extent, found // size.factor)
    fits = tensor.dtype in _TORCH[wanted.type] and tensor.is_contiguous() and 0 not in shape
    if not fits or not _known(wanted, sizes) or shape != _shape(wanted, sizes):
        raise EngineError(
            f"tensor {wanted.name!r} does not fit plan {spec.kind.name!r}",
            expected=f"contiguous {wanted.type} {[str(_bound(size, sizes)) for size in wanted.shape]}, nothing empty",
            found=f"{'' if tensor.is_contiguous() else 'strided '}{tensor.dtype} {list(shape)}",
        )


def _known(wanted: PlanTensor, sizes: Mapping[Extent, int]) -> bool:
    return all(size.extent in sizes for size in wanted.shape if isinstance(size, Size))


def _bound(size: int | Size, sizes: Mapping[Extent, int]) -> int | Size:
    if isinstance(size, int) or size.extent not in sizes:
        return size
    return sizes[size.extent] * size.factor


def _shape(wanted: PlanTensor, sizes: Mapping[Extent, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else sizes[size.extent] * size.factor for size in wanted.shape)
