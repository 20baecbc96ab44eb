"""Artifacts of coming requests are verified while others compute, so that admission finds nothing left to read."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Sequence

from trt_redknot.artifacts.lease import Lease
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.errors import StoreError

_log = logging.getLogger("trt_redknot.serving.preload")
# Seconds that a thread of ours waits for a process that removes an artifact. Admission, which everybody waits for, has
# no such patience.
_LOCKED_S = 30.0


class _Over(Exception):  # noqa: N818 - never leaves this module
    """Nobody waits for this job's artifacts any more."""


class _Work:
    def __init__(self, job: int, store: ArtifactStore, artifact_ids: Sequence[str]) -> None:
        self.job = job
        self.store = store
        self.artifact_ids = tuple(dict.fromkeys(artifact_ids))
        self.leases: list[Lease] = []
        self.over = False


class Preloader:
    """Opens and verifies artifacts on threads of its own. Calls come from one thread.

    What cannot be opened is left to the admission, which looks itself and has a reason for everything.

    Args:
        rank: whose part of the artifacts is verified.
        threads: jobs at once. They are daemons: one that hangs in a dead disk keeps no process alive.
    """

    def __init__(self, rank: int, *, threads: int) -> None:
        self._rank = rank
        self._waiting: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._works: dict[int, _Work] = {}
        self._finished: list[int] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: int, store: ArtifactStore, artifact_ids: Sequence[str]) -> None:
        work = _Work(job, store, artifact_ids)
        with self._lock:
            self._works[job] = work
        self._waiting.put(work)

    def finished(self) -> list[int]:
        """Jobs that were finished since this was asked last."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    @property
    def held(self) -> int:
        """Leases held now."""
        with self._lock:
            return sum(len(work.leases) for work in self._works.values())

    def release(self, job: int) -> None:
        """Let the job's artifacts go, verified or not. Nothing happens for a job that is not known."""
        with self._lock:
            work = self._works.pop(job, None)
            if work is None:
                return
            work.over = True
            leases, work.leases = work.leases, []
        for lease in leases:
            lease.close()

    def close(self) -> None:
        """Let everything go."""
        for job in list(self._works):
            self.release(job)
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                self._verify(work)
            except _Over:
                continue
            except Exception:  # noqa: BLE001 - the job's admission meets it again, and other jobs need this thread
                _log.exception("the artifacts of job %d could not be verified ahead of time", work.job)
            with self._lock:
                if not work.over:
                    self._finished.append(work.job)

    def _verify(self, work: _Work) -> None:
        def check() -> None:
            if work.over:
                raise _Over

        for artifact_id in work.artifact_ids:
            check()
            # ValueError: the lease was let go of meanwhile.
            with contextlib.suppress(StoreError, OSError, ValueError):
                lease = work.store.open(artifact_id, rank=self._rank, timeout_s=_LOCKED_S, between=check)
                with self._lock:
                    if not work.over:
                        work.leases.append(lease)
                        continue
                lease.close()
