"""How an op of ours enters a network: through a plugin of the registry, or cut out where no plugin can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkTensor, Shape
from trt_redknot.ops.tensorrt.writer import NetworkWriter

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT

NAMESPACE = "redknot"
VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class PluginOutput:
    """One output of a plugin, as the plugin's own shape code gives it for the inputs of the call."""

    name: str
    type: ElementType
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class PluginCall:
    """One plugin layer.

    Attributes:
        op: the op that asks for it.
        fields: creation fields; int for int32, float for float32.
        inputs: by the plugin's own input names, in its order.
        outputs: in its order. A test holds them against the plugin library's contract.
    """

    op: str
    plugin: str
    fields: Mapping[str, int | float]
    inputs: Mapping[str, NetworkTensor]
    outputs: tuple[PluginOutput, ...]


class PluginPort(Protocol):
    """Adds plugin layers to networks."""

    def add(self, writer: NetworkWriter, call: PluginCall) -> tuple[NetworkTensor, ...]:
        """The outputs of the call, in its order.

        Raises:
            EngineError: no plugin of this name, or it refused the fields.
        """

    def finish(self, writer: NetworkWriter) -> None:
        """Called once, when the outputs of the plan are marked."""


class RegistryPort:
    """Makes plugins through TensorRT's registry.

    Args:
        registry: one that has loaded the plugin library.
    """

    def __init__(self, registry: trt.IPluginRegistry) -> None:
        self._registry = registry

    def add(self, writer: NetworkWriter, call: PluginCall) -> tuple[NetworkTensor, ...]:
        module = writer.module
        creator = self._registry.get_creator(call.plugin, VERSION, NAMESPACE)
        if creator is None:
            raise EngineError(
                f"op {call.op!r} has no implementation: its plugin is missing from TensorRT's registry",
                expected=f"{NAMESPACE}::{call.plugin} version {VERSION}",
                remedy="Build the plugin library of this version: make plugins.",
            )
        fields = [_field(module, name, value) for name, value in call.fields.items()]
        layer_name = writer.unique(call.plugin)
        plugin = creator.create_plugin(layer_name, module.PluginFieldCollection(fields), module.TensorRTPhase.BUILD)
        if plugin is None:
            raise EngineError(
                f"op {call.op!r} cannot be built: its plugin refused its fields", expected=call.plugin,
                found=dict(call.fields), remedy="The log above has the plugin's reason.",
            )  # fmt: skip
        layer = writer.plugin(layer_name, plugin, tuple(call.inputs.values()))
        if layer.num_outputs != len(call.outputs):
            raise EngineError(
                f"the plugin of op {call.op!r} has another number of outputs", expected=len(call.outputs),
                found=f"{layer.num_outputs} of {call.plugin}", remedy="Build the plugin library of this version.",
            )  # fmt: skip
        return tuple(
            NetworkTensor(tensor=layer.get_output(index), type=output.type, shape=output.shape)
            for index, output in enumerate(call.outputs)
        )

    def finish(self, writer: NetworkWriter) -> None:
        pass


class CutPort:
    """Cuts every plugin out of the network: its outputs become network inputs, its inputs network outputs.

    What is left is native, and a TensorRT builder without plugin layers can be asked whether it accepts it.

    Attributes:
        calls: every plugin that was cut.
        added_inputs, added_outputs: what the cuts added to the network, by name.
    """

    def __init__(self) -> None:
        self.calls: list[PluginCall] = []
        self.added_inputs: dict[str, NetworkTensor] = {}
        self.added_outputs: dict[str, NetworkTensor] = {}
        self._consumed: list[tuple[str, NetworkTensor]] = []

    def add(self, writer: NetworkWriter, call: PluginCall) -> tuple[NetworkTensor, ...]:
        layer = writer.unique(call.plugin)
        self._consumed += [(f"{layer}.in.{name}", value) for name, value in call.inputs.items()]
        results = []
        for output in call.outputs:
            label = f"{layer}.out.{output.name}"
            result = writer.input(label, output.type, output.shape)
            self.added_inputs[label] = result
            results.append(result)
        self.calls.append(call)
        return tuple(results)

    def finish(self, writer: NetworkWriter) -> None:
        # What only a plugin reads would be dead without it.
        for label, value in self._consumed:
            if not any((value.tensor.is_network_input, value.tensor.is_network_output)):
                writer.output(label, value)
                self.added_outputs[label] = value


def _field(module: TensorRT, name: str, value: int | float) -> trt.PluginField:
    whole, real = module.PluginFieldType.INT32, module.PluginFieldType.FLOAT32
    key = cast("trt.FallbackString", name)
    if isinstance(value, float):
        return module.PluginField(key, np.array([value], dtype=np.float32), real)
    return module.PluginField(key, np.array([value], dtype=np.int32), whole)
