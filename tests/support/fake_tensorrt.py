"""TensorRT's runtime as its API promises to behave, without TensorRT: wrong calls fail the test, right ones compute.

A fake plan's bytes are the name of the plan. What an enqueue computes is handed in; inputs and outputs travel by
address only, as they do on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.interpreter import SPECIFIED
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, shape_ranges
from trt_redknot.engine.tensorrt.running import ALIGNMENT, plan_ranges
from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.ops.tensorrt.tensors import ElementType, Size, network_dims

Compute = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
VERSION = "11.4.0"
SCRATCH = 4096


class Mode(Enum):
    INPUT = 0
    OUTPUT = 1


class Strategy(Enum):
    STATIC = 0
    USER_MANAGED = 2


class DataType(Enum):
    FLOAT = "float32"
    BF16 = "bfloat16"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"


@dataclass(kw_only=True)
class Journal:
    """What was enqueued, in order, and on which stream; events of the fake CUDA runtime stand between."""

    entries: list[tuple[Any, ...]] = field(default_factory=list)
    communicators: list[tuple[str, object]] = field(default_factory=list)
    refuse: str | None = None


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The bytes at an address as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


class Context:
    """An execution context. False where the API answers False, AssertionError where its rules are broken."""

    def __init__(self, engine: Engine, strategy: Strategy) -> None:
        assert strategy is Strategy.USER_MANAGED, "contexts share scratch memory"
        self.engine = engine
        self.profile: int | None = None
        self.scratch: tuple[int, int] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream != 0, "a stream of its own"
        self.profile = index
        self.shapes.clear()
        return 0 <= index < self.engine.num_optimization_profiles

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % ALIGNMENT == 0
        assert size >= self.engine.get_device_memory_size_for_profile_v2(0)
        self.scratch = (address, size)

    def set_communicator(self, communicator: object) -> bool:
        self.engine.journal.communicators.append((self.engine.spec.kind.name, communicator))
        return self.engine.journal.refuse != self.engine.spec.kind.name

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None, "a profile is chosen before shapes"
        tensor = self.engine.inputs[name]
        ranges = shape_ranges(tensor.shape, list(self.engine.ranges.values())[self.profile])
        assert ranges is not None, f"{name} has one shape"
        least, _, most = ranges
        if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address != 0
        assert address % ALIGNMENT == 0, f"{name} at {address}"
        if name not in self.engine.tensors:
            return False
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        spec, name = self.engine.spec, self.engine.spec.kind.name
        assert stream != 0, "TensorRT waits for the device on the default stream"
        assert self.scratch is not None
        assert self.addresses.keys() == self.engine.tensors.keys(), f"not every tensor of {name} is bound"
        dynamic = {t.name for t in spec.inputs if any(isinstance(size, Size) for size in t.shape)}
        assert self.shapes.keys() == dynamic, f"not every shape of {name} is set"
        inputs = {
            t.name: memory(
                self.addresses[t.name], self.shapes.get(t.name, network_dims(t.shape)), SPECIFIED[t.type]
            )
            for t in spec.inputs
        }  # fmt: skip
        self.engine.journal.entries.append((name, list(Phase)[self.profile or 0], stream))
        for output, values in self.engine.compute(name, inputs).items():
            type_ = next(t.type for t in spec.outputs if t.name == output)
            target = memory(self.addresses[output], tuple(values.shape), SPECIFIED[type_])
            target.copy_(values.view(torch.int8) if type_ is ElementType.INT8 else values)
        return True


class Engine:
    """A deserialised plan."""

    def __init__(self, spec: PlanSpec, limits: PlanLimits, compute: Compute, journal: Journal) -> None:
        self.spec = spec
        self.compute = compute
        self.journal = journal
        self.inputs = {tensor.name: tensor for tensor in spec.inputs}
        self.tensors = {tensor.name: tensor for tensor in (*spec.inputs, *spec.outputs)}
        self.ranges = plan_ranges(spec, limits)
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(Phase)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.inputs else Mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.tensors[name].type.value)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return network_dims(self.tensors[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        ranges = shape_ranges(self.tensors[name].shape, list(self.ranges.values())[profile])
        assert ranges is not None
        return list(ranges)

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH + profile

    def create_execution_context(self, strategy: Strategy) -> Context:
        return Context(self, strategy)


def fake_module(specs: tuple[PlanSpec, ...], limits: PlanLimits, compute: Compute, journal: Journal) -> Any:
    """A module that opens the plans of `specs`."""
    named = {spec.kind.name: spec for spec in specs}

    class Runtime:
        def __init__(self, logger: object) -> None:
            pass

        def deserialize_cuda_engine(self, plan: bytes) -> Engine:
            return Engine(named[plan.decode()], limits, compute, journal)

    return SimpleNamespace(
        __version__=VERSION, Runtime=Runtime, TensorIOMode=Mode, DataType=DataType,
        ExecutionContextAllocationStrategy=Strategy,
    )  # fmt: skip


class FakeCuda:
    """`cuda.bindings.runtime` with streams and events that are numbers, noted in the journal.

    Attributes:
        status: what the next calls answer.
    """

    cudaStreamNonBlocking = 1  # noqa: N815
    cudaEventDisableTiming = 2  # noqa: N815

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._next = 100
        self.status = 0
        self.alive: set[int] = set()

    def _new(self, flags: int, wanted: int) -> tuple[int, int]:
        assert flags == wanted
        self._next += 1
        self.alive.add(self._next)
        return self.status, self._next

    def _gone(self, handle: int) -> tuple[int]:
        self.alive.remove(handle)
        return (self.status,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:  # noqa: N802
        return self._new(flags, self.cudaStreamNonBlocking)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, int]:  # noqa: N802
        return self._new(flags, self.cudaEventDisableTiming)

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        return self._gone(stream)

    def cudaEventDestroy(self, event: int) -> tuple[int]:  # noqa: N802
        return self._gone(event)

    def cudaEventRecord(self, event: int, stream: int) -> tuple[int]:  # noqa: N802
        self._journal.entries.append(("record", event, stream))
        return (self.status,)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:  # noqa: N802
        assert flags == 0
        self._journal.entries.append(("wait", event, stream))
        return (self.status,)
