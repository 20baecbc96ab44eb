"""Loads in the background: submit, poll, one result for each load, each with a deadline. Failed loads are data.

Order of calls: a loader is made once and closed once. `submit` returns at once. Every submitted load has exactly one
result, which `poll` or `wait` hands out exactly once. Calls may come from any thread.

Ownership: buffers are the caller's. A loader writes to a buffer only between `submit` and the load's result; a result,
whatever it is, gives the buffer back for good. After anything but LOADED its content is undefined. Leases are the
caller's too: one that is closed early fails its loads and nothing else.

Deadlines hold even where a disk hangs: what is read goes through memory of the loader's own, so that a late load can be
given up at any moment.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.lease import Lease
from trt_redknot.errors import StoreError

# How much is copied into a buffer at a time: what a deadline may have to wait for.
_STEP_BYTES = 8 << 20


class LoadState(StrEnum):
    """How a load ended. LATE: its deadline passed. CANCELLED: by `cancel` or `close`."""

    LOADED = "loaded"
    FAILED = "failed"
    LATE = "late"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """One tensor, or rows of it, to be read into a buffer.

    Attributes:
        key: the caller's name for it, handed back with the result.
        buffer: host memory of the decoded tensor's shape ([len(rows), ...] with rows) and of the dtype wanted.
        rows: int64 [k], any order, repeats allowed; None: the whole tensor.
        deadline_s: seconds from `submit`; None: no limit.
    """

    key: object
    lease: Lease
    part: Part
    layer: int | None
    buffer: torch.Tensor
    rows: torch.Tensor | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadResult:
    """What became of one load. `error` says why it FAILED; `seconds` are from `submit` to the end."""

    ticket: int
    key: object
    state: LoadState
    seconds: float
    error: StoreError | None = None


class _Open:
    """A load without a result. `lock` is held while its buffer is written, and to give it its one result."""

    def __init__(self, ticket: int, load: Load, started: float) -> None:
        self.ticket = ticket
        self.load = load
        self.started = started
        self.deadline = None if load.deadline_s is None else started + load.deadline_s
        self.lock = threading.Lock()
        self.over = False


class _GivenUp(Exception):  # noqa: N818 - never leaves this module
    """The load has its result already."""


class ArtifactLoader:
    """Loads tensors of leased artifacts on threads of its own. A context manager.

    Args:
        threads: loads that run at once. The threads are daemons: one that hangs in a dead disk keeps no process alive.
        clock: monotonic seconds.
    """

    def __init__(self, *, threads: int = 2, clock: Callable[[], float] = time.monotonic) -> None:
        if threads < 1:
            raise ValueError(f"threads: expected at least 1, found {threads}")
        self._clock = clock
        self._tickets = itertools.count(1)
        self._waiting: queue.SimpleQueue[_Open | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._open: dict[int, _Open] = {}
        self._results: dict[int, LoadResult] = {}
        self._closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, loads: Sequence[Load]) -> list[int]:
        """Take loads in order and return a ticket for each at once.

        Raises:
            ValueError: a buffer is not contiguous host memory, or the loader is closed; nothing is taken then.
        """
        for load in loads:
            if load.buffer.device.type != "cpu" or not load.buffer.is_contiguous():
                raise ValueError(f"load {load.key!r}: the buffer is not contiguous host memory")
        now = self._clock()
        with self._state:
            if self._closed:
                raise ValueError("the loader is closed")
            taken = [_Open(next(self._tickets), load, now) for load in loads]
            self._open |= {each.ticket: each for each in taken}
        for each in taken:
            self._waiting.put(each)
        return [each.ticket for each in taken]

    def poll(self, tickets: Sequence[int] | None = None) -> list[LoadResult]:
        """Results that are there now, of these tickets or of all, oldest ticket first. Never waits for a disk."""
        self._expire()
        with self._state:
            ready = sorted(self._results if tickets is None else self._results.keys() & set(tickets))
            return [self._results.pop(ticket) for ticket in ready]

    def wait(self, tickets: Sequence[int], timeout_s: float | None = None) -> list[LoadResult]:
        """Wait until these tickets have results, at most `timeout_s` seconds; those that are there then, as `poll`."""
        end = None if timeout_s is None else self._clock() + timeout_s
        while True:
            self._expire()
            with self._state:
                now = self._clock()
                missing = [self._open[ticket] for ticket in tickets if ticket in self._open]
                if not missing or (end is not None and now >= end):
                    break
                limits = [each.deadline for each in missing if each.deadline is not None]
                limits += [] if end is None else [end]
                self._state.wait(max(0.0, min(limits) - now) if limits else None)
        return self.poll(tickets)

    def cancel(self, tickets: Sequence[int]) -> None:
        """Give up loads; those that have no result yet get CANCELLED."""
        with self._state:
            found = [self._open[ticket] for ticket in tickets if ticket in self._open]
        for each in found:
            self._finish(each, LoadState.CANCELLED)

    @property
    def pending(self) -> int:
        """Loads without a result."""
        with self._state:
            return len(self._open)

    def close(self) -> None:
        """Cancel what is open and end the threads. Results stay to be polled; a thread in a dead disk is left alone."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            tickets = list(self._open)
        self.cancel(tickets)
        for _ in self._threads:
            self._waiting.put(None)

    def __enter__(self) -> ArtifactLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expire(self) -> None:
        now = self._clock()
        with self._state:
            late = [each for each in self._open.values() if each.deadline is not None and each.deadline <= now]
        for each in late:
            self._finish(each, LoadState.LATE)

    def _finish(self, each: _Open, state: LoadState, error: StoreError | None = None) -> None:
        with each.lock:
            if each.over:
                return
            each.over = True
        result = LoadResult(
            ticket=each.ticket, key=each.load.key, state=state, seconds=self._clock() - each.started, error=error
        )
        with self._state:
            self._results[each.ticket] = result
            del self._open[each.ticket]
            self._state.notify_all()

    def _work(self) -> None:
        try:
            while (each := self._waiting.get()) is not None:
                self._serve(each)
        finally:
            # After a bug, which the interpreter prints, nobody must wait for this thread.
            self.close()

    def _serve(self, each: _Open) -> None:
        try:
            self._read(each)
        except _GivenUp:
            return
        except StoreError as error:
            self._finish(each, LoadState.FAILED, error)
        except (IndexError, ValueError, RuntimeError, OSError) as error:
            # A row outside the tensor, a lease that was closed, memory that ran out: this load's fault alone.
            self._finish(each, LoadState.FAILED, StoreError(f"a load failed: {error}", path=each.load.lease.path))
        else:
            self._finish(each, LoadState.LOADED)

    def _check(self, each: _Open) -> None:
        if each.deadline is not None and self._clock() >= each.deadline:
            self._finish(each, LoadState.LATE)
        if each.over:
            raise _GivenUp

    def _read(self, each: _Open) -> None:
        load = each.load
        self._check(each)
        load.lease.check(load.part, load.layer, lambda: self._check(each))
        shape = load.lease.shape(load.part, load.layer)
        count = shape[0] if load.rows is None else load.rows.numel()
        wanted = (count, *shape[1:])
        if tuple(load.buffer.shape) != wanted:
            raise ArtifactError(
                ArtifactFault.FILE_HEADER, "a buffer has another shape than the tensor", expected=wanted,
                found=tuple(load.buffer.shape), path=load.lease.path,
            )  # fmt: skip
        rows = torch.arange(count) if load.rows is None else load.rows.reshape(-1)
        row_bytes = max(1, load.buffer.nbytes // max(1, count))
        step = max(1, _STEP_BYTES // row_bytes)
        for start in range(0, count, step):
            self._check(each)
            some = rows[start : start + step]
            values = load.lease.rows(load.part, load.layer, some, load.buffer.dtype)
            with each.lock:
                if each.over:
                    raise _GivenUp
                load.buffer[start : start + step].copy_(values)
