"""CUDA graphs of steps whose only inputs are one batch of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from trt_redknot.engine.uploads import ArrayBatch


class CapturedStep:
    """A step that was captured over a buffer of its own, to be replayed for other numbers of the same layout."""

    def __init__(self, graph: torch.cuda.CUDAGraph, numbers: torch.Tensor, result: torch.Tensor) -> None:
        self._graph = graph
        self._numbers = numbers
        self._result = result

    def replay(self, batch: ArrayBatch) -> torch.Tensor:
        """The step's result, valid until the next replay. Queued on the current stream; the host does not wait."""
        self._numbers.copy_(batch.packed(self._numbers.device), non_blocking=True)
        self._graph.replay()
        return self._result


def capture(
    run: Callable[[Sequence[torch.Tensor]], torch.Tensor], batch: ArrayBatch, device: torch.device
) -> CapturedStep:
    """Capture what `run` queues for tensors of the batch's layout. Nothing runs before the first replay.

    Other threads may use the device meanwhile.

    Raises:
        RuntimeError: `run` does something that no graph can hold, such as waiting for the device.
    """
    numbers = torch.zeros(batch.size, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(device)
    beside = _capture_stream(device)
    beside.wait_stream(current)
    # Not `torch.cuda.graph`: it waits for the device and gives the cached memory of all others back to the driver.
    with torch.cuda.stream(beside):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = run(batch.views(numbers))
        finally:
            graph.capture_end()
    current.wait_stream(beside)
    return CapturedStep(graph, numbers, result)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures: libraries keep memory for every stream they have seen."""
    return torch.cuda.Stream(device)
