"""Runs the plans of an opened engine: contexts, memory, streams and communicators; one enqueue a plan, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.running import (
    LoadedPlan,
    aligned,
    bind_sizes,
    choose_phase,
    empty_aligned,
    empty_outputs,
    plan_ranges,
)
from trt_redknot.engine.tensorrt.specification import needs_other_ranks
from trt_redknot.engine.tensorrt.streams import PlanStream
from trt_redknot.errors import EngineError

if TYPE_CHECKING:
    from trt_redknot.ops.tensorrt.handle import TensorRT


# Whole tensors that all rows of a run read.
POOLS = frozenset({"latents", "entries", "index_keys", "rope"})


class PlanSession:
    """Implements :class:`trt_redknot.engine.tensorrt.backend.PlanRuntime` on a GPU.

    Everything is made here: contexts for each plan and phase, one scratch memory that all of them share (plans of a
    session never run at the same time, whatever streams they are given), the stream. A run allocates its outputs from
    torch and does nothing else that a CUDA graph could not capture.

    Args:
        current_stream: handle of the caller's CUDA stream.

    Raises:
        EngineError: TensorRT has no memory for a context.
    """

    def __init__(
        self,
        module: TensorRT,
        plans: Mapping[str, LoadedPlan],
        limits: PlanLimits,
        device: torch.device,
        stream: PlanStream,
        *,
        current_stream: Callable[[], int],
    ) -> None:
        self._plans = plans
        self._ranges = {name: plan_ranges(plan.spec, limits) for name, plan in plans.items()}
        self._device = device
        self._stream = stream
        self._current_stream = current_stream
        self._kept: list[object] = []
        size = max((plan.scratch_bytes() for plan in plans.values()), default=0)
        # A pointer is asked for even where no plan works in scratch memory.
        self._scratch = empty_aligned((max(1, size),), torch.uint8, device)
        for plan in plans.values():
            plan.prepare(module, self._scratch, stream.handle)

    def connect(self, communicator: object) -> None:
        """Hand the ranks' communicator (an ncclComm_t as a capsule) to TensorRT's own collective layers. Collective.

        Raises:
            EngineError: TensorRT has no such call, or refuses. Unchecked, a refusal makes these layers silent no-ops.
        """
        for plan in self._plans.values():
            for context in plan.contexts if needs_other_ranks(plan.spec) else ():
                set_communicator: Any = getattr(context, "set_communicator", None)
                if set_communicator is None:
                    raise _refused("this TensorRT has no set_communicator")
                if not set_communicator(communicator):
                    raise _refused(f"set_communicator of plan {plan.spec.kind.name!r} returned False")

    def run(self, plan: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Enqueue a plan on the current stream, or beside the default stream in its order.

        Raises:
            EngineError: a tensor does not fit the plan, no profile holds its sizes, or TensorRT refuses.
        """
        loaded = self._plans[plan]
        spec = loaded.spec
        # Rows of a chunk may begin anywhere. Weights and pools are whole tensors: a copy of one would never be meant.
        fixed = {tensor.name for tensor in spec.inputs if tensor.weight} | POOLS
        bound = {name: tensor if name in fixed else aligned(tensor) for name, tensor in tensors.items()}
        sizes = bind_sizes(spec, bound)
        phase = choose_phase(spec, self._ranges[plan], sizes)
        outputs = empty_outputs(spec, sizes, self._device)
        with self._stream.running(self._current_stream()) as stream:
            loaded.run(phase, bound, outputs, stream)
        return outputs

    def keep(self, resource: object) -> None:
        """Let something that contexts or plugins point to live as long as the session."""
        self._kept.append(resource)

    def close(self) -> None:
        """Give the stream back. The plans go with this object."""
        self._stream.close()


def _refused(found: str) -> EngineError:
    return EngineError(
        "TensorRT refused the communicator of the ranks", found=found,
        remedy="Build the engine with --collectives plugin.",
    )  # fmt: skip
