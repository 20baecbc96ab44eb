"""A service whose ranks this process starts: mpirun as a child, every rank tied to us by a socket.

Each rank connects back before it does anything else. The connection is its lifeline: when a rank dies its end closes,
we fail what is open and end the job; when we die, every rank sees the end and leaves. Rank 0's connection also carries
requests and events.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

from trt_redknot.errors import LaunchError, RedKnotError
from trt_redknot.launch import mpirun_command, mpirun_environment
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
from trt_redknot.serving.socket import Channel, ChannelError, Listener
from trt_redknot.serving.stream import Stream

START_TIMEOUT_S = 1800.0
_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.2
# Seconds that ranks get to end by themselves, then those that mpirun gets to end them.
_STOP_S = 10.0
_TERMINATE_S = 5.0


class Orchestrator:
    """Ranks under an mpirun of our own, offered as one service. Any thread may call. Open one with :meth:`open`.

    Args:
        listener: where the ranks connect.
        process: mpirun, leader of a session of its own.
    """

    def __init__(self, config: ServingConfig, listener: Listener, process: subprocess.Popen[bytes]) -> None:
        self._config = config
        self._listener = listener
        self._process = process
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._state = State.STARTING
        self._detail: str | None = None
        self._failure: str | None = None
        self._ranks: dict[int, Channel] = {}
        self._handles: dict[int, int] = {}
        self._streams: dict[int, Stream] = {}
        self._calls: dict[int, queue.SimpleQueue[object]] = {}
        self._next = 0

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
        """
        listener = Listener()
        try:
            command = mpirun_command(
                config.world_size, ["-m", "trt_redknot.serving", "rank", "--socket", str(listener.path)]
            )
            process = subprocess.Popen(
                command, env=mpirun_environment(environment), stdin=subprocess.DEVNULL, start_new_session=True
            )
        except (RedKnotError, OSError):
            listener.close()
            raise
        service = cls(config, listener, process)
        threading.Thread(target=service._accept, daemon=True).start()
        threading.Thread(target=service._await_job, daemon=True).start()
        service._ready.wait(start_timeout_s)
        if service._state is not State.READY:
            reason = service._failure or service._detail or f"not ready after {start_timeout_s:g} s"
            service._end(reason)
            service._stop_job(0.0)
            raise LaunchError(f"the ranks do not serve: {reason}", remedy="The ranks' own messages are in the log.")
        return service

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
            channel = self._ranks[0]
        message = {
            "op": "submit",
            "stream": number,
            "kind": "build" if isinstance(request, BuildRequest) else "generate",
            "request": request.model_dump(mode="json", exclude_unset=True),
        }
        try:
            channel.send(message)
        except ChannelError as error:
            with self._lock:
                self._streams.pop(number, None)
                gone = self._state is not State.READY
            if gone:
                raise self._gone() from error
            raise ServingError(ServingFault.TOO_LARGE, str(error)) from error
        return stream

    def _cancel(self, number: int) -> None:
        with self._lock:
            channel = self._ranks.get(0) if number in self._streams else None
        if channel is not None:
            with contextlib.suppress(ChannelError):
                channel.send({"op": "cancel", "stream": number})

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
            state=state, world_size=self._config.world_size, waiting=0, running=0,
            detail=self._detail or "rank 0 does not answer",
        )  # fmt: skip

    def metrics(self) -> str:
        """Everything counted on rank 0, in Prometheus' text format; empty when rank 0 does not answer."""
        value = self._call("metrics")
        return value if isinstance(value, str) else ""

    def close(self) -> None:
        """End the ranks; open requests fail with `shutting_down`. No process is left behind."""
        with self._lock:
            first = self._state in (State.READY, State.STARTING)
            if first:
                self._state, self._detail = State.CLOSED, "the service was closed"
            channel = self._ranks.get(0)
        if channel is not None and first:
            with contextlib.suppress(ChannelError):
                channel.send({"op": "stop"})
        self._stop_job(_STOP_S if first else 0.0)
        self._fail_streams(ServingFault.SHUTTING_DOWN, "the service was closed")

    @property
    def processes(self) -> tuple[int, ...]:
        """mpirun, then the ranks that have connected."""
        with self._lock:
            return (self._process.pid, *(channel.peer[0] for _, channel in sorted(self._ranks.items())))

    def _gone(self) -> ServingError:
        closed = self._state is State.CLOSED
        fault = ServingFault.SHUTTING_DOWN if closed else ServingFault.RANK_FAILED
        return ServingError(fault, self._detail or "the service is not there")

    def _call(self, op: str) -> object | None:
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        with self._lock:
            channel = self._ranks.get(0)
            if self._state is not State.READY or channel is None:
                return None
            self._next += 1
            number = self._next
            self._calls[number] = answer
        try:
            channel.send({"op": op, "call": number})
            return answer.get(timeout=_CALL_TIMEOUT_S)
        except (ChannelError, queue.Empty):
            return None
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _accept(self) -> None:
        while not self._ended.is_set() and len(self._ranks) < self._config.world_size:
            try:
                channel = self._listener.accept(_POLL_S)
            except ChannelError:
                return
            if channel is not None:
                threading.Thread(target=self._follow, args=(channel,), daemon=True).start()
        # Nobody else is to come, and what lies in the file system would outlive a process that is killed.
        self._listener.close()

    def _follow(self, channel: Channel) -> None:
        """Read one rank's connection to its end."""
        rank: int | None = None
        try:
            rank = self._welcome(channel)
            while (message := channel.receive()) is not None:
                self._handle(rank, message)
            reason = "its process ended"
        except (ChannelError, ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error)
        self._end(f"rank {'unknown' if rank is None else rank} is gone: {reason}")
        channel.close()

    def _welcome(self, channel: Channel) -> int:
        hello = channel.receive()
        if hello is None or hello.get("op") != "hello" or type(hello.get("rank")) is not int:
            raise ChannelError("a process connected that is no rank", found=hello)
        rank = int(hello["rank"])
        if hello["size"] != self._config.world_size:
            raise ChannelError("mpirun started another number of ranks", expected=self._config.world_size, found=hello)
        handle = os.pidfd_open(channel.peer[0])
        with self._lock:
            if rank in self._ranks or not 0 <= rank < self._config.world_size:
                os.close(handle)
                raise ChannelError("a process connected that is no rank", found=hello)
            self._ranks[rank], self._handles[rank] = channel, handle
        channel.send({"op": "config", "config": self._config.model_dump(mode="json")})
        return rank

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

    def _await_job(self) -> None:
        code = self._process.wait()
        # A rank's own words, which are in its socket, say more than the status of the job.
        time.sleep(_POLL_S)
        self._end(f"the ranks' job ended with status {code}")

    def _end(self, reason: str) -> None:
        """The job is broken, or over: fail what is open, then end what is left of it."""
        with self._lock:
            broken = self._state in (State.STARTING, State.READY)
            if broken:
                self._state, self._detail = State.UNHEALTHY, self._failure or reason
        self._ready.set()
        if broken:
            self._fail_streams(ServingFault.RANK_FAILED, f"the ranks of the service failed: {self._detail}")
            threading.Thread(target=self._stop_job, args=(0.0,), daemon=True).start()

    def _stop_job(self, patience_s: float) -> None:
        """End mpirun and every rank: wait, ask, insist. mpirun's ranks are in sessions of their own."""
        for action, wait_s in ((None, patience_s), (signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _TERMINATE_S)):
            if action is not None and self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, action)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break
        self._ended.set()
        with self._lock:
            handles, self._handles = list(self._handles.values()), {}
            channels = list(self._ranks.values())
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        for channel in channels:
            channel.close()
        self._listener.close()
