"""TensorRT's build phases as steps of a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorrt as trt

    from trt_redknot.ops.tensorrt.handle import TensorRT

STEPS_PER_PLAN = 100


class PlanProgress:
    """Turns the phases of one build into exactly STEPS_PER_PLAN steps, never backwards.

    Args:
        advance: told how many steps to move on.
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._done = 0
        # name -> (first step, steps it covers, its own number of steps)
        self._phases: dict[str, tuple[float, float, int]] = {}

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        start, size = 0.0, float(STEPS_PER_PLAN)
        if parent in self._phases:
            # A phase inside another runs during one of its steps.
            start, size, count = self._phases[parent]
            start, size = max(start, float(self._done)), size / max(count, 1)
        self._phases[phase] = (start, size, steps)

    def step(self, phase: str, step: int) -> None:
        if phase in self._phases:
            start, size, count = self._phases[phase]
            self._reach(start + size * (step + 1) / max(count, 1))

    def finish_phase(self, phase: str) -> None:
        self._phases.pop(phase, None)

    def finish(self) -> None:
        """The plan is built: whatever steps are left."""
        self._reach(STEPS_PER_PLAN)

    def _reach(self, target: float) -> None:
        steps = min(int(target), STEPS_PER_PLAN) - self._done
        if steps > 0:
            self._done += steps
            self._advance(steps)


def make_monitor(module: TensorRT, progress: PlanProgress) -> trt.IProgressMonitor:
    """What a builder configuration takes as its progress monitor."""

    class _Monitor(module.IProgressMonitor):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish_phase(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step(phase_name, step)
            return True

    return _Monitor()
