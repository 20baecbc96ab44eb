"""A service whose ranks this process starts: mpirun as a child, every rank tied to us by a socket.

Each rank connects back before it does anything else. The connection is its lifeline: when a rank dies its end closes,
we fail what is open and end the job; when we die, every rank sees the end and leaves. Rank 0's connection also carries
requests and events.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Mapping
from typing import Any

from trt_redknot.errors import LaunchError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import (
    BuildRequest,
    Event,
    FailedEvent,
    Health,
    ServingError,
    ServingFault,
    ServingRequest,
    State,
    event_from_json,
    is_final,
)
from trt_redknot.serving.rankjob import RankJob
from trt_redknot.serving.socket import ChannelError, TooLargeError
from trt_redknot.serving.stream import Stream

START_TIMEOUT_S = 1800.0
_CALL_TIMEOUT_S = 10.0
# Seconds that ranks get to end by themselves.
_STOP_S = 10.0


class Orchestrator:
    """Ranks under an mpirun of our own, offered as one service. Any thread may call.

    Open one with :meth:`open`. The constructor starts the ranks and returns at once; :meth:`await_ready` has to follow.

    Args:
        environment: of the ranks; left out: this process's.

    Raises:
        LaunchError: no mpirun.
        ChannelError: no socket can be made.
    """

    def __init__(self, config: ServingConfig, environment: Mapping[str, str] | None = None) -> None:
        self._world_size = config.world_size
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._state = State.STARTING
        self._detail: str | None = None
        self._failure: str | None = None
        self._streams: dict[int, Stream] = {}
        self._calls: dict[int, queue.SimpleQueue[object]] = {}
        self._next = 0
        self._job = RankJob.start(config, environment, self._handle, self._end)
        self._job.follow()

    @classmethod
    def open(
        cls, config: ServingConfig, *, start_timeout_s: float = START_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
    ) -> Orchestrator:  # fmt: skip
        """Start the ranks and wait until they serve.

        Args:
            start_timeout_s: seconds they may take to load the engine.
            environment: of the ranks; left out: this process's.

        Raises:
            LaunchError: no mpirun; the ranks did not start, or refused the engine: with what they said.
            ChannelError: no socket can be made.
        """
        service = cls(config, environment)
        service.await_ready(start_timeout_s)
        return service

    def await_ready(self, timeout_s: float) -> None:
        """Wait until the ranks serve.

        Raises:
            LaunchError: they did not in `timeout_s` seconds, refused the engine (with what they said), or `close` came
                first. They are ended.
        """
        self._ready.wait(timeout_s)
        if self._state is not State.READY:
            reason = self._failure or self._detail or f"not ready after {timeout_s:g} s"
            self._break(reason)
            self._job.stop(0.0)
            raise LaunchError(f"the ranks do not serve: {reason}", remedy="The ranks' own messages are in the log.")

    @property
    def processes(self) -> tuple[int, ...]:
        """mpirun, then the ranks that have connected."""
        return self._job.processes

    def submit(self, request: ServingRequest | BuildRequest) -> Stream:
        """Start a request. Refusals of the service come as its last event.

        Raises:
            ServingError: the service is closed or has lost a rank.
        """
        with self._lock:
            if self._state is not State.READY:
                raise self._gone()
            self._next += 1
            number = self._next
            stream = Stream(request.request_id or "", functools.partial(self._cancel, number))
            self._streams[number] = stream
        message = {
            "op": "submit",
            "stream": number,
            "kind": "build" if isinstance(request, BuildRequest) else "generate",
            "request": request.model_dump(mode="json", exclude_unset=True),
        }
        try:
            self._job.send(message)
        except ChannelError as error:
            with self._lock:
                self._streams.pop(number, None)
                gone = self._state is not State.READY
            if gone:
                raise self._gone() from error
            # Rank 0 may be gone before the thread that reads its connection has told so.
            fault = ServingFault.TOO_LARGE if isinstance(error, TooLargeError) else ServingFault.RANK_FAILED
            raise ServingError(fault, str(error)) from error
        return stream

    def health(self) -> Health:
        """Of the ranks, asked now. A rank 0 that does not answer in time is not healthy."""
        value = self._call("health")
        if isinstance(value, dict):
            return Health(
                state=State(value["state"]), world_size=int(value["world_size"]), waiting=int(value["waiting"]),
                running=int(value["running"]), detail=value["detail"],
            )  # fmt: skip
        state = State.UNHEALTHY if self._state is State.READY else self._state
        return Health(
            state=state, world_size=self._world_size, waiting=0, running=0,
            detail=self._detail or "rank 0 does not answer",
        )  # fmt: skip

    def metrics(self) -> str:
        """Everything counted on rank 0, in Prometheus' text format; empty when rank 0 does not answer."""
        value = self._call("metrics")
        return value if isinstance(value, str) else ""

    def close(self) -> None:
        """End the ranks; open requests fail with `shutting_down`. No process is left behind."""
        with self._lock:
            serving = self._state is State.READY
            if serving or self._state is State.STARTING:
                self._state, self._detail = State.CLOSED, "the service was closed"
        if serving:
            with contextlib.suppress(ChannelError):
                self._job.send({"op": "stop"})
        # Ranks that still load the engine listen to nobody.
        self._job.stop(_STOP_S if serving else 0.0)
        self._ready.set()
        self._fail_streams(ServingFault.SHUTTING_DOWN, "the service was closed")

    def _cancel(self, number: int) -> None:
        with self._lock:
            known = number in self._streams
        if known:
            with contextlib.suppress(ChannelError):
                self._job.send({"op": "cancel", "stream": number})

    def _gone(self) -> ServingError:
        closed = self._state is State.CLOSED
        fault = ServingFault.SHUTTING_DOWN if closed else ServingFault.RANK_FAILED
        return ServingError(fault, self._detail or "the service is not there")

    def _call(self, op: str) -> object | None:
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        with self._lock:
            if self._state is not State.READY:
                return None
            self._next += 1
            number = self._next
            self._calls[number] = answer
        try:
            self._job.send({"op": op, "call": number})
            return answer.get(timeout=_CALL_TIMEOUT_S)
        except (ChannelError, queue.Empty):
            return None
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        match message["op"]:
            case "event":
                self._deliver(int(message["stream"]), event_from_json(message["event"]))
            case "reply":
                with self._lock:
                    answer = self._calls.get(int(message["call"]))
                if answer is not None:
                    answer.put(message["value"])
            case "ready":
                with self._lock:
                    if self._state is State.STARTING:
                        self._state = State.READY
                self._ready.set()
            case "failed":
                with self._lock:
                    self._failure = self._failure or str(message["message"])
            case other:
                raise ChannelError("a rank sent an unknown message", found=f"{other!r} of rank {rank}")

    def _deliver(self, number: int, event: Event) -> None:
        with self._lock:
            stream = self._streams.pop(number, None) if is_final(event) else self._streams.get(number)
        if stream is not None:
            stream.put(event)

    def _fail_streams(self, fault: ServingFault, message: str) -> None:
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.put(FailedEvent(fault=fault, message=message))

    def _end(self, reason: str) -> None:
        """A rank or the job is gone: fail what is open, then end what is left of it."""
        if self._break(reason):
            threading.Thread(target=self._job.stop, args=(0.0,), daemon=True).start()

    def _break(self, reason: str) -> bool:
        """Nothing more will be answered. False where that is known already, or the service was closed."""
        with self._lock:
            broken = self._state in (State.STARTING, State.READY)
            if broken:
                self._state, self._detail = State.UNHEALTHY, self._failure or reason
        self._ready.set()
        if broken:
            self._fail_streams(ServingFault.RANK_FAILED, f"the ranks of the service failed: {self._detail}")
        return broken
