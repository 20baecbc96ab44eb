"""CUDA graphs of steps whose only inputs are one batch of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, TypeVar

import torch

from trt_redknot.engine.uploads import ArrayBatch

Result = TypeVar("Result")


class CapturedStep(Generic[Result]):
    """A step that was captured over a buffer of its own, to be replayed for other numbers of the same layout.

    Args:
        numbers: the buffer.
        first: the view of the batch's first array in it.
        result: what the step gives, in memory of its own.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, numbers: torch.Tensor, first: torch.Tensor, result: Result) -> None:
        self._graph = graph
        self._numbers = numbers
        self._first = first
        self._result = result

    def replay(self, batch: ArrayBatch, first: torch.Tensor | None = None) -> Result:
        """The step's result, valid until the next replay. Queued on the current stream; the host does not wait.

        Args:
            first: the numbers of the batch's first array, on the device, in place of those that the host has.
        """
        self._numbers.copy_(batch.packed(self._numbers.device), non_blocking=True)
        if first is not None:
            self._first.copy_(first)
        self._graph.replay()
        return self._result


def capture(
    run: Callable[[Sequence[torch.Tensor]], Result], batch: ArrayBatch, device: torch.device
) -> CapturedStep[Result]:
    """Capture what `run` queues for tensors of the batch's layout. Nothing runs before the first replay.

    Other threads may use the device meanwhile.

    Raises:
        RuntimeError: `run` does something that no graph can hold, such as waiting for the device.
    """
    numbers = torch.zeros(batch.size, dtype=torch.int64, device=device)
    views = batch.views(numbers)
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(device)
    beside = _capture_stream(device)
    beside.wait_stream(current)
    # Not `torch.cuda.graph`: it waits for the device and gives the cached memory of all others back to the driver.
    with torch.cuda.stream(beside):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = run(views)
        finally:
            graph.capture_end()
    current.wait_stream(beside)
    return CapturedStep(graph, numbers, views[0], result)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: libraries keep memory for every stream they have seen."""
    return torch.cuda.Stream(device)
