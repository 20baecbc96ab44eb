"""Plans without TensorRT: what emission called, op by op, done again by the torch references on the same named tensors.

What runs is the recorded data flow of the emitted networks, not the functions that they were emitted from. Sizes, names
and shapes are held to the plans' specifications as a session does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.engine.tensorrt.emission import emit_plan
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits
from trt_redknot.engine.tensorrt.running import bind_sizes, choose_phase, output_shape, plan_ranges
from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.engine.tensorrt.verification import unpacked
from trt_redknot.ops.experts import QuantisedExperts
from trt_redknot.ops.interface import Ops
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.ops.reference.packing import pack_pool_latents, pack_rows
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.ops.tensorrt.plugins import CutPort
from trt_redknot.ops.tensorrt.tensors import (
    ElementType,
    Extent,
    NetworkExperts,
    NetworkPool,
    NetworkRows,
    NetworkTensor,
)
from trt_redknot.ops.tensorrt.writer import NetworkWriter

SPECIFIED = {
    ElementType.FLOAT32: torch.float32,
    ElementType.BFLOAT16: torch.bfloat16,
    ElementType.INT8: torch.int8,
    ElementType.INT32: torch.int32,
    ElementType.INT64: torch.int64,
}
Values = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class OpStep:
    """One op of a plan: what it was called with, and the network tensors that it gave."""

    name: str
    arguments: tuple[Any, ...]
    attributes: Mapping[str, Any]
    results: tuple[NetworkTensor, ...]


@dataclass(kw_only=True)
class Recording:
    """One plan as it was emitted."""

    spec: PlanSpec
    steps: list[OpStep] = field(default_factory=list)
    inputs: dict[str, NetworkTensor] = field(default_factory=dict)
    outputs: dict[str, NetworkTensor] = field(default_factory=dict)

    def watch(self, ops: Ops) -> Ops:
        recording = self

        class _Watched:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                op = getattr(ops, name)

                def call(*arguments: Any, **attributes: Any) -> Any:
                    result = op(*arguments, **attributes)
                    results = result if isinstance(result, tuple) else (() if result is None else (result,))
                    recording.steps.append(
                        OpStep(name=name, arguments=arguments, attributes=attributes, results=results)
                    )
                    return result

                return call

        watched: Any = _Watched()
        return watched  # type: ignore[no-any-return]


def record(platform: Platform, spec: PlanSpec) -> Recording:
    """Emit a plan and keep what was called, and which values are its inputs and outputs."""
    recording = Recording(spec=spec)
    make_input, make_output = NetworkWriter.input, NetworkWriter.output

    def add_input(writer: NetworkWriter, name: str, *given: Any) -> NetworkTensor:
        value = make_input(writer, name, *given)
        recording.inputs[name] = value
        return value

    def add_output(writer: NetworkWriter, name: str, value: NetworkTensor) -> None:
        recording.outputs[name] = value
        make_output(writer, name, value)

    network = platform.module.Builder(platform.logger).create_network(1)
    with mock.patch.object(NetworkWriter, "input", add_input), mock.patch.object(NetworkWriter, "output", add_output):
        emit_plan(platform.module, network, spec, CutPort(), watch=recording.watch)
    return recording


class Interpreter:
    """Implements :class:`trt_redknot.engine.tensorrt.backend.PlanRuntime` on a CPU.

    Args:
        dtype: what the plans' bf16 becomes, so that equal means equal.

    Attributes:
        runs: plans in the order they ran, with the profile that their sizes need.
    """

    def __init__(
        self, platform: Platform, specs: tuple[PlanSpec, ...], limits: PlanLimits, collectives: Collectives,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._recordings = {spec.kind.name: record(platform, spec) for spec in specs}
        self.specs = specs
        self._ranges = {spec.kind.name: plan_ranges(spec, limits) for spec in specs}
        self._ops = ReferenceOps(collectives)
        self._world = collectives.size
        self._dtype = dtype
        self._experts: dict[int, torch.Tensor] = {}
        self.runs: list[tuple[str, Phase]] = []

    def run(self, plan: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        recording = self._recordings[plan]
        spec = recording.spec
        assert tensors.keys() == {tensor.name for tensor in spec.inputs}, plan
        described = {tensor.name: self._described(tensor.type, tensors[tensor.name]) for tensor in spec.inputs}
        sizes = bind_sizes(spec, described)
        self.runs.append((plan, choose_phase(spec, self._ranges[plan], sizes)))
        numbers = unpacked(spec, tensors, self._dtype)
        replay = _Replay(self, tensors, sizes, {id(recording.inputs[name]): numbers[name] for name in tensors})
        for step in recording.steps:
            replay.step(step)
        outputs = {}
        for wanted in spec.outputs:
            value = recording.outputs[wanted.name]
            # The reference raises where a router meets a fault.
            nothing = torch.zeros(1, dtype=torch.int32) if wanted.name == "faults" else None
            outputs[wanted.name] = found = replay.values.get(id(value), nothing)
            assert found is not None, (plan, wanted.name)
            if wanted.type is ElementType.INT8:
                is_key = wanted.name == "index_keys"
                found = pack_rows(found) if is_key else pack_pool_latents(found, spec.geometry.rope_dim)
                outputs[wanted.name] = found = found.view(torch.int8)
            assert tuple(found.shape) == output_shape(wanted, sizes), (plan, wanted.name)
        return outputs

    def _described(self, type_: ElementType, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's shape with the element type that the plan would get."""
        if type_ in (ElementType.FLOAT32, ElementType.BFLOAT16):
            assert tensor.is_floating_point()
            dtype = SPECIFIED[type_]
        else:
            dtype = tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")

    def experts(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Weights of experts as numbers, once a tensor."""
        key = codes.data_ptr()
        if key not in self._experts:
            weight = QuantisedExperts(codes=codes.view(torch.float8_e4m3fn), scales=scales)
            self._experts[key] = torch.stack([weight.expert(each, self._dtype) for each in range(len(codes))])
        return self._experts[key]

    @property
    def ops(self) -> ReferenceOps:
        return self._ops

    @property
    def world(self) -> int:
        return self._world


class _Replay:
    """One run of one recording."""

    def __init__(
        self, owner: Interpreter, tensors: Mapping[str, torch.Tensor], sizes: Mapping[Extent, int], values: Values
    ) -> None:
        self._owner = owner
        self._tensors = tensors
        self._sizes = sizes
        self.values = values

    def step(self, step: OpStep) -> None:
        if step.name == "write_rows":
            # Written rows are outputs of the plan.
            pool, _, written = step.arguments
            assert isinstance(pool, NetworkPool)
            assert id(written) in self.values
            return
        arguments = [self._value(argument) for argument in step.arguments]
        attributes = dict(step.attributes)
        if step.name in ("all_gather", "reduce_scatter"):
            rows = arguments[0].shape[0]
            arguments[1] = [rows if step.name == "all_gather" else rows // self._owner.world] * self._owner.world
        if "tau" in attributes:
            attributes["tau"] = float(self._tensors["tau"])
        if "first" in attributes:
            attributes["first"] = int(self._tensors["first_expert"])
        result = getattr(self._owner.ops, step.name)(*arguments, **attributes)
        found = result if isinstance(result, tuple) else (result,)
        for value, tensor in zip(step.results, found, strict=True):
            self.values[id(value)] = tensor

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, NetworkTensor):
            return self.values[id(argument)]
        if isinstance(argument, NetworkExperts):
            return self._owner.experts(self._value(argument.codes), self._value(argument.scales))
        if isinstance(argument, NetworkRows):
            return self._sizes[argument.size.extent] * argument.size.factor
        if isinstance(argument, AttentionTable | CompressTable):
            fields = {f.name: self._value(getattr(argument, f.name)) for f in dataclasses.fields(argument)}
            return type(argument)(**fields)
        if isinstance(argument, list | tuple):
            return [self._value(each) for each in argument]
        return argument
