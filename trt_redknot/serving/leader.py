"""A service whose ranks mpirun has started already: rank 0 is this process, the others run :func:`follow_leader`.

Every other rank holds a connection to rank 0 besides MPI, because MPI does not say that a rank has died: it just waits.
When a connection ends, its other end is gone: rank 0 fails what is open and ends the job, and a worker leaves.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trt_redknot.config.documents import parse_json_object, validated_json
from trt_redknot.errors import LaunchError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.frontend import Serving
from trt_redknot.serving.messages import (
    BuildRequest,
    FailedEvent,
    Health,
    ServingError,
    ServingFault,
    ServingRequest,
    State,
)
from trt_redknot.serving.rank import end_after
from trt_redknot.serving.socket import Channel, ChannelError, Listener, connect
from trt_redknot.serving.stream import Stream

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_CONNECT_S = 60.0
_WATCH_S = 1.0
# Seconds in which clients get to read that the service failed, before its processes are ended.
_FAREWELL_S = 5.0
_GRACE_S = 10.0


class Leader:
    """The service of rank 0 and the connections to the other ranks. Open one with :meth:`open`.

    Args:
        service: what runs on rank 0.
        workers: connections, in no order.
        comm: all ranks; None for one.
    """

    def __init__(self, service: Serving, workers: list[Channel], comm: Intracomm | None, world_size: int) -> None:
        self._service = service
        self._workers = workers
        self._comm = comm
        self._world_size = world_size
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._failure: str | None = None
        self._closed = False
        for channel in workers:
            threading.Thread(target=self._follow, args=(channel,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    @classmethod
    def open(cls, config: ServingConfig, comm: Intracomm | None) -> Leader:
        """Serve on rank 0, with the workers that wait in :func:`follow_leader`.

        Raises:
            LaunchError: another number of ranks than the configuration says, or they do not connect.
            RedKnotError: the engine is refused.
        """
        from trt_redknot.serving.service import Service

        size = 1 if comm is None else comm.Get_size()
        if size != config.world_size:
            raise LaunchError(
                "the job has another number of ranks than the service", expected=config.world_size, found=size,
                remedy="In leader mode mpirun starts one Triton server and world_size - 1 workers.",
            )  # fmt: skip
        if comm is None or size == 1:
            return cls(Service.open(config, None), [], None, 1)
        listener = Listener()
        try:
            hello = {"socket": str(listener.path), "config": config.model_dump(mode="json")}
            _broadcast(comm, json.dumps(hello).encode())
            workers = _await_workers(listener, size - 1)
        finally:
            listener.close()
        return cls(Service.open(config, comm), workers, comm, size)

    def submit(self, request: ServingRequest | BuildRequest) -> Stream:
        """Start a request. Raises ServingError where it is refused at once, or a rank is lost."""
        with self._lock:
            failure = self._failure
        if failure is not None:
            raise ServingError(ServingFault.RANK_FAILED, failure)
        stream = self._service.submit(request)
        with self._lock:
            self._streams = [*(item for item in self._streams if not item.complete), stream]
            failure = self._failure
        if failure is not None:
            stream.put(FailedEvent(fault=ServingFault.RANK_FAILED, message=failure))
        return stream

    def health(self) -> Health:
        with self._lock:
            failure = self._failure
        if failure is None:
            return self._service.health()
        return Health(state=State.UNHEALTHY, world_size=self._world_size, waiting=0, running=0, detail=failure)

    def metrics(self) -> str:
        """Everything counted on this rank, in Prometheus' text format."""
        return self._service.metrics()

    def close(self) -> None:
        """End the service; the workers leave. After a failure the job is being ended already."""
        with self._lock:
            first, self._closed = not self._closed, True
            failed = self._failure is not None
        if not first or failed:
            return
        if self._comm is None:
            self._service.close()
            return
        from mpi4py import MPI

        end_after(_GRACE_S, "the service does not close")
        self._service.close()
        # Workers leave only together with rank 0, whose process may stay for a while.
        MPI.Finalize()
        for channel in self._workers:
            channel.close()

    def _follow(self, channel: Channel) -> None:
        """Wait for the end of a worker's connection."""
        with contextlib.suppress(ChannelError):
            channel.receive()
        with self._lock:
            closed = self._closed
        if not closed:
            self._fail(f"a rank (process {channel.peer[0]}) is gone")

    def _watch(self) -> None:
        while not self._closed:
            health = self._service.health()
            if health.state is State.UNHEALTHY:
                self._fail(health.detail or "the service is unhealthy")
                return
            time.sleep(_WATCH_S)

    def _fail(self, reason: str) -> None:
        with self._lock:
            first, self._failure = self._failure is None, self._failure or reason
            streams, self._streams = self._streams, []
        if not first:
            return
        for stream in streams:
            stream.put(FailedEvent(fault=ServingFault.RANK_FAILED, message=reason))
        if self._comm is not None:
            time.sleep(_FAREWELL_S)
            self._comm.Abort(1)


def follow_leader(comm: Intracomm) -> None:
    """A worker of :class:`Leader`: until rank 0 closes the service. Everything it must know comes from rank 0.

    Raises:
        LaunchError: rank 0 is not reachable.
        RedKnotError: the engine is refused.
    """
    from trt_redknot.serving.worker import run_worker

    hello = parse_json_object(_broadcast(comm, b""))
    config = validated_json(ServingConfig, hello["config"], Path("rank 0's message"))
    try:
        channel = connect(hello["socket"])
    except ChannelError as error:
        raise LaunchError(
            f"rank 0 is not reachable: {error}", remedy="Leader mode needs all ranks on one machine."
        ) from error

    def gone() -> None:
        with contextlib.suppress(ChannelError):
            channel.receive()
        end_after(_GRACE_S, "rank 0 is gone")

    threading.Thread(target=gone, daemon=True).start()
    run_worker(config, comm)


def _broadcast(comm: Intracomm, content: bytes) -> bytes:
    """Rank 0's bytes, on every rank. Waits without using the core: a server may load for minutes."""
    size = np.array([len(content)], dtype=np.int64)
    _wait(comm.Ibcast(size, root=0))
    buffer = np.frombuffer(content, dtype=np.uint8) if comm.Get_rank() == 0 else np.empty(int(size[0]), dtype=np.uint8)
    _wait(comm.Ibcast(buffer, root=0))
    return buffer.tobytes()


def _wait(request: Request) -> None:
    while not request.Test():
        time.sleep(0.01)


def _await_workers(listener: Listener, count: int) -> list[Channel]:
    workers: list[Channel] = []
    deadline = time.monotonic() + _CONNECT_S
    while len(workers) < count:
        channel = listener.accept(max(0.0, deadline - time.monotonic()))
        if channel is None:
            raise LaunchError("the other ranks do not connect", expected=count, found=len(workers))
        workers.append(channel)
    return workers
