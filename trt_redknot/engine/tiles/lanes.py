"""The lane that tiles are copied on, beside the computation: a CUDA stream with events, or the copying thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the order of work on one side."""


class CopyLane(Protocol):
    """Copies run in order on the lane; marks order them with the computation, without the host waiting for either.

    `copy`, `after`, `mark_copied` and `finish` are called by the copying thread, the others by the computing one.
    """

    def empty(self, size: int) -> torch.Tensor:
        """uint8 [size] on the device."""
        ...

    def staging(self, size: int) -> torch.Tensor:
        """uint8 [size] in host memory that the lane copies from."""
        ...

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin copies from host or device memory. `sources` stay untouched until the next mark is finished."""
        ...

    def after(self, mark: Mark) -> None:
        """Later copies wait for the computation's mark."""
        ...

    def mark_copied(self) -> Mark:
        """All copies begun so far."""
        ...

    def finish(self, mark: Mark) -> None:
        """Wait, on the host, until the copies before the mark are done."""
        ...

    def mark_computed(self) -> Mark:
        """All computation queued so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """Computation queued from now on comes after the copies' mark."""
        ...

    def late_s(self, asked: Mark, copied: Mark) -> float:
        """Seconds by which the copies came after the computation that waited for them; 0 where they were in time."""
        ...


class ThreadLane:
    """Copies are made by the calling thread, at once: for engines whose device is the host."""

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def staging(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def after(self, mark: Mark) -> None:
        return None

    def mark_copied(self) -> Mark:
        return _Instant()

    def finish(self, mark: Mark) -> None:
        return None

    def mark_computed(self) -> Mark:
        return _Instant()

    def wait(self, mark: Mark) -> None:
        return None

    def late_s(self, asked: Mark, copied: Mark) -> float:
        assert isinstance(asked, _Instant)
        assert isinstance(copied, _Instant)
        return max(0.0, copied.at - asked.at)


class _Instant:
    def __init__(self) -> None:
        self.at = time.perf_counter()


class CudaLane:
    """Copies on a stream of their own; the computation is whatever stream is current where it is asked.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def staging(self, size: int) -> torch.Tensor:
        # Pinning opens a context on the calling thread's device, which need not be ours.
        with torch.cuda.device(self._device):
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if targets:
            # One call for all: the computing thread has Python's lock meanwhile.
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._stream.wait_event(mark)

    def mark_copied(self) -> Mark:
        return self._recorded(self._stream)

    def finish(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def mark_computed(self) -> Mark:
        return self._recorded(torch.cuda.current_stream(self._device))

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def late_s(self, asked: Mark, copied: Mark) -> float:
        assert isinstance(asked, torch.cuda.Event)
        assert isinstance(copied, torch.cuda.Event)
        asked.synchronize()
        copied.synchronize()
        return max(0.0, float(asked.elapsed_time(copied)) / 1e3)

    @staticmethod
    def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def lane_for(device: torch.device) -> CopyLane:
    """A lane to `device`. A GPU has one lane a request; they share the copy engine, not the order."""
    return CudaLane(device) if device.type == "cuda" else ThreadLane()
