"""The stream that plans run on, and the events that order it with the caller's, through cuda-python."""

# ruff: noqa: N802, N815

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from trt_redknot.errors import EngineError

# TensorRT waits for the whole device where it is enqueued on this one.
DEFAULT_STREAM = 0


class CudaRuntime(Protocol):
    """What this package uses of `cuda.bindings.runtime`. Every call gives a status first."""

    cudaStreamNonBlocking: int
    cudaEventDisableTiming: int

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, Any]: ...
    def cudaStreamDestroy(self, stream: Any) -> tuple[Any]: ...
    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, Any]: ...
    def cudaEventRecord(self, event: Any, stream: Any) -> tuple[Any]: ...
    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any]: ...
    def cudaEventDestroy(self, event: Any) -> tuple[Any]: ...


def find_cuda_runtime(name: str = "cuda.bindings.runtime") -> CudaRuntime:
    """cuda-python's bindings.

    Raises:
        EngineError: they are not installed, or cannot be loaded.
    """
    try:
        return cast("CudaRuntime", importlib.import_module(name))
    except (ImportError, OSError) as error:
        raise EngineError(
            "cuda-python is not installed", expected=name, found=error, remedy="Install it: pip install cuda-python."
        ) from error


class PlanStream:
    """A stream of its own for callers on the default stream; others keep theirs, so that they can capture a CUDA graph.

    Events order the two: what was enqueued before a plan is done before it, what comes after waits for it. The host
    waits for neither. Plans share contexts and scratch memory, so a plan on another stream than the last one waits for
    that one; CUDA refuses this, and so do we, where just one of the two streams is being captured.

    Attributes:
        handle: of the stream.
    """

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._stream = self._value(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
        self._before = self._value(cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming))
        self._after = self._value(cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming))
        self.handle = int(self._stream)
        self._last: int | None = None

    @contextmanager
    def running(self, caller: int) -> Iterator[int]:
        """The stream to enqueue on, for a caller whose current stream is `caller`.

        Raises:
            EngineError: CUDA cannot order it behind the last plan.
        """
        own = caller == DEFAULT_STREAM
        stream = self._stream if own else caller
        handle = int(stream)
        if own:
            self._order(self._before, caller, stream)
        if self._last not in (None, handle):
            self._value(self._cuda.cudaStreamWaitEvent(stream, self._after, 0))
        yield handle
        self._last = handle
        self._value(self._cuda.cudaEventRecord(self._after, stream))
        if own:
            self._value(self._cuda.cudaStreamWaitEvent(caller, self._after, 0))

    def close(self) -> None:
        """Give the stream and its events back. What was enqueued is still done."""
        for event in (self._before, self._after):
            self._value(self._cuda.cudaEventDestroy(event))
        self._value(self._cuda.cudaStreamDestroy(self._stream))

    def _order(self, event: Any, first: Any, then: Any) -> None:
        self._value(self._cuda.cudaEventRecord(event, first))
        self._value(self._cuda.cudaStreamWaitEvent(then, event, 0))

    @staticmethod
    def _value(answer: tuple[Any, ...]) -> Any:
        status, *values = answer
        if int(status) != 0:
            raise EngineError("CUDA refused a stream or an event", found=getattr(status, "name", status))
        return values[0] if values else None
