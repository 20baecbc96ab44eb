"""Defines the network of a plan: the model's layer functions, run with the emitting backend of the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.engine.tensorrt.stages import Stage, StageRun, run_stage
from trt_redknot.engine.weights import SCALE
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops
from trt_redknot.ops.tensorrt.calls import Calling
from trt_redknot.ops.tensorrt.emitter import EmitterOps
from trt_redknot.ops.tensorrt.plugins import PluginPort
from trt_redknot.ops.tensorrt.tensors import Extent, NetworkExperts, NetworkPool, NetworkRows, NetworkTensor, Size
from trt_redknot.ops.tensorrt.writer import NetworkWriter

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT


def emit_plan(
    module: TensorRT,
    network: trt.INetworkDefinition,
    spec: PlanSpec,
    port: PluginPort,
    *,
    watch: Callable[[Ops], Ops] = lambda ops: ops,
) -> None:
    """Add the layers, inputs and outputs of a plan to an empty network.

    Args:
        watch: wraps the ops before the layer functions get them.

    Raises:
        EngineError: an op has no implementation for this geometry, or TensorRT refuses a layer.
    """
    writer = NetworkWriter(module, network)
    inputs = {tensor.name: writer.input(tensor.name, tensor.type, tensor.shape) for tensor in spec.inputs}
    calling = Calling(tau=inputs.get("tau"), first_expert=inputs.get("first_expert"))
    ops = EmitterOps(
        writer, port, spec.geometry, calling, world=spec.world, packed=spec.format.packed_cache,
        native_collectives=spec.format.native_collectives,
    )  # fmt: skip
    results = run_stage(watch(ops), spec.kind.stage, _run_of(writer, spec, inputs)) | ops.written
    if ops.faults:
        (results["faults"],) = ops.faults
    assert results.keys() == {tensor.name for tensor in spec.outputs}, (spec.kind.name, sorted(results))
    for tensor in spec.outputs:
        value = results[tensor.name]
        assert (value.type, value.shape) == (tensor.type, tensor.shape), (spec.kind.name, tensor, value)
        writer.output(tensor.name, value)
    port.finish(writer)


def _run_of(writer: NetworkWriter, spec: PlanSpec, inputs: dict[str, NetworkTensor]) -> StageRun:
    stage, layers = spec.kind.stage, spec.kind.layers(spec.geometry)
    # What a layer differs in beside its weights, tau and the first expert, are inputs of the plan.
    layer = LayerSpec(geometry=spec.geometry, layer=layers[0] if layers else 0, tau=1.0, first_expert=0)
    full_rows: NetworkRows | int = 0
    pools: dict[str, NetworkPool | None] | None = None
    if stage is Stage.ATTEND:
        count = writer.difference(writer.rows_of(inputs["query_latent"]), writer.rows_of(inputs["restored"]))
        full_rows = NetworkRows(size=Size(extent=Extent.FULL_ROWS), count=count)
    if stage is Stage.COMPRESS:
        pools = {name: NetworkPool(name=name) for name in ("entries", "index_keys")} | {"entry_rows": None}
    return StageRun(spec=layer, tensors=_with_experts(inputs), full_rows=full_rows, pools=pools)


def _with_experts(inputs: dict[str, NetworkTensor]) -> dict[str, NetworkTensor | NetworkExperts]:
    """The inputs, with the codes and scales of expert weights put together."""
    scaled = {name.removesuffix(SCALE) for name in inputs if name.endswith(SCALE)} & inputs.keys()
    joined = {name: NetworkExperts(codes=inputs[name], scales=inputs[name + SCALE]) for name in scaled}
    return {**inputs, **joined}
