"""Running one plan: sizes from its inputs, addresses bound, one enqueue on the caller's stream."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, Range, profile_ranges
from trt_redknot.engine.tensorrt.specification import PlanSpec, PlanTensor
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent, Size

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT

# Bytes; TensorRT asks it of every address.
ALIGNMENT = 256
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


def output_shape(wanted: PlanTensor, sizes: Mapping[Extent, int]) -> tuple[int, ...]:
    """The shape of a tensor of the plan once all sizes are known."""
    return tuple(size if isinstance(size, int) else sizes[size.extent] * size.factor for size in wanted.shape)


Ranges = Mapping[Phase, Mapping[Extent, Range]]


def plan_ranges(spec: PlanSpec, limits: PlanLimits) -> Ranges:
    """The sizes that each optimization profile of a plan holds."""
    return {phase: profile_ranges(spec.geometry, spec.kind.stage, limits, spec.world, phase) for phase in Phase}


def choose_phase(spec: PlanSpec, profiles: Ranges, sizes: Mapping[Extent, int]) -> Phase:
    """The optimization profile for these sizes: the one for decoding where it holds them.

    Raises:
        EngineError: neither profile does.
    """
    outside: list[str] = []
    for phase in (Phase.DECODE, Phase.PREFILL):
        ranges = profiles[phase]
        outside = [
            f"{size} {extent} (at most {ranges[extent].most})"
            for extent, size in sizes.items()
            if not ranges[extent].least <= size <= ranges[extent].most
        ]
        if not outside:
            return phase
    raise EngineError(
        f"plan {spec.kind.name!r} was not built for these sizes", found=", ".join(outside),
        remedy="Build the engine with larger --chunk-rows, --max-length, --pool-tokens or --decode-rows.",
    )  # fmt: skip


def empty_aligned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that a plan can be bound to, whatever the allocator's own alignment."""
    size = math.prod(shape) * dtype.itemsize
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size].view(dtype).view(shape)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where TensorRT would not take its address."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return empty_aligned(tuple(tensor.shape), tensor.dtype, tensor.device).copy_(tensor)


def empty_outputs(spec: PlanSpec, sizes: Mapping[Extent, int], device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for the plan's outputs."""
    return {
        tensor.name: empty_aligned(output_shape(tensor, sizes), _TORCH[tensor.type][0], device)
        for tensor in spec.outputs
    }


class LoadedPlan:
    """A plan with one execution context for each phase, all made before the first run.

    Nothing here waits for the device or allocates. Inputs and outputs must live until the stream has passed the plan.
    Addresses and shapes are set before every enqueue, so that a CUDA graph captures what it will replay.
    """

    def __init__(self, spec: PlanSpec, engine: trt.ICudaEngine) -> None:
        self.spec = spec
        self._engine = engine
        self._contexts: dict[Phase, trt.IExecutionContext] = {}

    def scratch_bytes(self) -> int:
        """Device memory that any of its contexts works in."""
        return max(self._engine.get_device_memory_size_for_profile_v2(index) for index, _ in enumerate(Phase))

    @property
    def contexts(self) -> tuple[trt.IExecutionContext, ...]:
        """Of all phases, in order; none before `prepare`."""
        return tuple(self._contexts.values())

    def prepare(self, module: TensorRT, scratch: torch.Tensor, stream: int) -> None:
        """Make the contexts.

        Args:
            scratch: at least `scratch_bytes` bytes; may be shared with plans that run on the same stream.
            stream: CUDA stream handle; what it still has to do comes before the first run.

        Raises:
            EngineError: TensorRT has no memory left, or the plan lacks a profile.
        """
        for index, phase in enumerate(Phase):
            context: trt.IExecutionContext | None = self._engine.create_execution_context(
                module.ExecutionContextAllocationStrategy.USER_MANAGED
            )
            if context is None or not context.set_optimization_profile_async(index, stream):
                raise EngineError(
                    f"TensorRT made no execution context for plan {self.spec.kind.name!r}", found=phase,
                    remedy="Free device memory; the log above has TensorRT's reason.",
                )  # fmt: skip
            context.set_device_memory(scratch.data_ptr(), scratch.numel())
            self._contexts[phase] = context

    def run(
        self, phase: Phase, tensors: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], stream: int
    ) -> None:
        """Enqueue the plan.

        Args:
            tensors: inputs and weights by name, aligned, on the device, in sizes that :func:`bind_sizes` accepted.
            outputs: where the results go (:func:`empty_outputs` of these sizes).
            stream: CUDA stream handle.

        Raises:
            EngineError: TensorRT refuses a size, an address or the enqueue.
        """
        name, context = self.spec.kind.name, self._contexts[phase]
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
            self._bind(context, wanted.name, outputs[wanted.name])
        if not context.execute_async_v3(stream):
            raise EngineError(f"TensorRT did not enqueue plan {name!r}", remedy="The log above has TensorRT's reason.")

    def _bind(self, context: trt.IExecutionContext, name: str, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if address % ALIGNMENT:
            raise EngineError(
                f"tensor {name!r} of plan {self.spec.kind.name!r} lies at an address that TensorRT does not take",
                expected=f"a multiple of {ALIGNMENT}", found=address,
            )  # fmt: skip
        if not context.set_tensor_address(name, address):
            raise EngineError(f"TensorRT did not take the address of {name!r}", found=self.spec.kind.name)


def _check(spec: PlanSpec, wanted: PlanTensor, tensor: torch.Tensor, sizes: dict[Extent, int]) -> None:
    """Check one tensor, and add the sizes it brings to `sizes`."""
    shape = tuple(tensor.shape)
    if len(shape) == len(wanted.shape):
        for size, found in zip(wanted.shape, shape, strict=True):
            if isinstance(size, Size) and found > 0 and found % size.factor == 0:
                sizes.setdefault(size.extent, found // size.factor)
    fits = tensor.dtype in _TORCH[wanted.type] and tensor.is_contiguous() and 0 not in shape
    if not fits or not _known(wanted, sizes) or shape != output_shape(wanted, sizes):
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
