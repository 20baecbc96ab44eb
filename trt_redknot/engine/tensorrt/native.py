"""What moves rows between ranks inside plans: TensorRT 11's own collective layers where they work, else our plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.collectives.agreement import agree
from trt_redknot.collectives.device import connect
from trt_redknot.engine.tensorrt.communicator import PlanCommunicator
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.errors import EngineError, RedKnotError
from trt_redknot.ops.tensorrt.tensors import ElementType
from trt_redknot.ops.tensorrt.writer import NetworkWriter

if TYPE_CHECKING:
    import tensorrt as trt

Wanted = Literal["auto", "plugin", "native"]
Chosen = Literal["none", "plugin", "native"]
# Raises EngineError, on all ranks, where TensorRT's collective layers do not work between them.
Trial = Callable[[Platform, Collectives], None]
OLDEST_NATIVE = 11
_LOG = logging.getLogger("trt_redknot.tensorrt")


def choose_collectives(wanted: Wanted, platform: Platform, collectives: Collectives, trial: Trial) -> Chosen:
    """What the plans of an engine are built with. Collective.

    Args:
        wanted: `auto` takes TensorRT's own where this version has them and `trial` passes.

    Raises:
        EngineError: `native` was asked for, and this TensorRT has none or the trial failed; on all ranks.
    """
    if collectives.size == 1:
        return "none"
    major = int(platform.version.split(".")[0])
    if wanted == "plugin" or (wanted == "auto" and major < OLDEST_NATIVE):
        return "plugin"
    try:
        if major < OLDEST_NATIVE:
            raise EngineError(
                "this TensorRT has no collective layers", expected=f"{OLDEST_NATIVE} or newer", found=platform.version,
                remedy="Build with --collectives plugin.",
            )  # fmt: skip
        trial(platform, collectives)
    except EngineError as refusal:
        if wanted == "native":
            raise
        _LOG.warning("plans move rows by our plugin, because TensorRT's own layers do not work here: %s", refusal)
        return "plugin"
    return "native"


def try_native(platform: Platform, collectives: Collectives) -> None:
    """Build the smallest plan with a collective layer, and hand it the ranks' communicator. Collective.

    Raises:
        EngineError: as :data:`Trial`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    context: trt.IExecutionContext | None = None
    failure: RedKnotError | None = None
    try:
        context = smallest_context(platform, collectives.size)
    except RedKnotError as error:
        failure = error
    # A rank that has no context would leave the others waiting for its communicator.
    agree(collectives, None, failure)
    try:
        communicator = PlanCommunicator(connect(collectives, device), device)
        set_communicator: Any = getattr(context, "set_communicator", None)
        if set_communicator is None or not set_communicator(communicator.capsule()):
            failure = EngineError(
                "TensorRT refused the communicator of the ranks", remedy="Build with --collectives plugin."
            )
    except RedKnotError as error:
        failure = error
    agree(collectives, None, failure)


def smallest_context(platform: Platform, world: int) -> trt.IExecutionContext:
    """A context of a plan that gathers one row a rank.

    Raises:
        EngineError: TensorRT cannot build or open it.
    """
    builder = platform.module.Builder(platform.logger)
    network = builder.create_network(1 << int(platform.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    writer = NetworkWriter(platform.module, network)
    own = writer.input("own", ElementType.FLOAT32, (1, 8))
    writer.output("all", writer.collective("all_gather", own, (world, 8), world=world))
    config = builder.create_builder_config()
    platform.configure(config)
    plan = builder.build_serialized_network(network, config)
    engine: trt.ICudaEngine | None = None
    if plan is not None:
        engine = platform.module.Runtime(platform.logger).deserialize_cuda_engine(bytes(plan))
    context: trt.IExecutionContext | None = None if engine is None else engine.create_execution_context()
    if context is None:
        raise EngineError("TensorRT cannot open a plan with a collective layer")
    return context
