"""From opened plans to a session that runs them: a stream, and communicators where there are several ranks."""

from __future__ import annotations

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.collectives.agreement import agree
from trt_redknot.engine.tensorrt.backend import PlanBackend
from trt_redknot.engine.tensorrt.communicator import PlanCommunicator, hand_to_plugins
from trt_redknot.engine.tensorrt.opening import OpenedPlans
from trt_redknot.engine.tensorrt.session import PlanSession
from trt_redknot.engine.tensorrt.streams import PlanStream, find_cuda_runtime
from trt_redknot.errors import RedKnotError


def start_plans(opened: OpenedPlans, collectives: Collectives, device: torch.device) -> PlanBackend:
    """A session over the plans on this rank's GPU. Collective.

    Raises:
        EngineError: no cuda-python, no memory for a context, or a communicator that NCCL, our plugins or TensorRT
            refuse; on all ranks.
    """
    session: PlanSession | None = None
    failure: RedKnotError | None = None
    try:
        session = PlanSession(
            opened.platform.module, opened.plans, opened.limits, device, PlanStream(find_cuda_runtime()),
            current_stream=lambda: torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip
    except RedKnotError as error:
        failure = error
    # Before the ranks meet: a rank without contexts would leave the others waiting.
    agree(collectives, None, failure)
    assert session is not None
    if collectives.size > 1:
        try:
            _connect(opened, session, collectives, device)
        except RedKnotError as error:
            failure = error
        agree(collectives, None, failure)
    return PlanBackend(specs=opened.specs, limits=opened.limits, runtime=session)


def _connect(opened: OpenedPlans, session: PlanSession, collectives: Collectives, device: torch.device) -> None:
    communicator = PlanCommunicator(collectives, device)
    session.keep(communicator)
    if opened.specs[0].format.native_collectives:
        session.connect(communicator.capsule())
        return
    library = opened.platform.plugin_library
    assert library is not None, "a platform that runs plans has loaded a plugin library"
    hand_to_plugins(communicator.pointer, library)
