"""One rank of a service that a front end started: tied to it by a socket, which on rank 0 carries the requests too."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_redknot.config.documents import validated_json
from trt_redknot.errors import RedKnotError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.frontend import Serving
from trt_redknot.serving.messages import (
    BuildRequest,
    Event,
    FailedEvent,
    ServingError,
    ServingFault,
    ServingRequest,
    State,
)
from trt_redknot.serving.socket import Channel, ChannelError, TooLargeError, connect
from trt_redknot.serving.stream import Stream

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Seconds that a rank whose front end is gone gets to end in order, before its process is ended.
_GRACE_S = 10.0
_HEALTH_S = 1.0
_FAILED_STATUS = 4

_log = logging.getLogger("trt_redknot.serving.rank")


@dataclass(kw_only=True, eq=False)
class _Open:
    """A request of the front end that has not ended; no stream while its texts become tokens."""

    thread: threading.Thread
    stream: Stream | None = None
    cancelled: bool = False


class FrontEndLink:
    """Rank 0: answers what the front end sends, until it says stop or is gone.

    A request has a thread of its own: texts may take long to become tokens, and nobody waits behind them.

    Args:
        channel: the connection to the front end.
    """

    def __init__(self, service: Serving, channel: Channel) -> None:
        self._service = service
        self._channel = channel
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}

    def run(self) -> None:
        """Serve. Returns when the front end has said stop; raises ChannelError when it is gone.

        The service is left open.
        """
        while (message := self._channel.receive()) is not None:
            match message.get("op"):
                case "submit":
                    self._submit(message)
                case "cancel":
                    self._cancel(int(message["stream"]))
                case "health":
                    self._reply(message, self._service.health().to_json())
                case "metrics":
                    self._reply(message, self._service.metrics())
                case "stop":
                    return
                case other:
                    raise ChannelError("the front end sent an unknown message", found=other)
        raise ChannelError("the front end is gone")

    def join(self) -> None:
        """Wait for what is still being answered. The service is closed: texts become tokens to their end at most.

        A process that ends while a thread of it is in a tokenizer is aborted.
        """
        with self._lock:
            threads = [request.thread for request in self._open.values()]
        for thread in threads:
            thread.join()

    def _reply(self, message: dict[str, Any], value: object) -> None:
        self._channel.send({"op": "reply", "call": message["call"], "value": value})

    def _submit(self, message: dict[str, Any]) -> None:
        number = int(message["stream"])
        kind = BuildRequest if message["kind"] == "build" else ServingRequest
        thread = threading.Thread(target=self._answer, args=(number, kind, message["request"]), daemon=True)
        # Known from now on: a cancellation may come before there is a stream.
        with self._lock:
            self._open[number] = _Open(thread=thread)
        thread.start()

    def _cancel(self, number: int) -> None:
        with self._lock:
            request = self._open.get(number)
            if request is None:
                return
            request.cancelled = True
            stream = request.stream
        if stream is not None:
            stream.cancel()

    def _answer(self, number: int, kind: type[BuildRequest | ServingRequest], content: dict[str, Any]) -> None:
        # What is said if this thread breaks in a way nobody foresaw: the client waits.
        last: FailedEvent | None = FailedEvent(fault=ServingFault.INTERNAL, message="the service's log says more")
        try:
            self._forward(number, self._service.submit(kind.parse(content)))
            last = None
        except TooLargeError as error:
            last = FailedEvent(fault=ServingFault.INTERNAL, message=str(error))
        except ServingError as error:
            last = FailedEvent(fault=error.fault, message=str(error))
        except RedKnotError as error:
            last = FailedEvent(fault=ServingFault.INVALID_REQUEST, message=str(error))
        finally:
            # Where the front end is gone, `run` sees it too.
            with contextlib.suppress(ChannelError):
                if last is not None:
                    self._send(number, last)
            with self._lock:
                del self._open[number]

    def _forward(self, number: int, stream: Stream) -> None:
        with self._lock:
            request = self._open[number]
            request.stream = stream
            cancelled = request.cancelled
        if cancelled:
            stream.cancel()
        try:
            for event in stream:
                self._send(number, event)
        except TooLargeError:
            raise
        except ChannelError:
            # The front end is gone, and waits for nothing.
            return
        finally:
            # What cannot be sent need not be computed.
            if not stream.complete:
                stream.cancel()

    def _send(self, number: int, event: Event) -> None:
        self._channel.send({"op": "event", "stream": number, "event": event.to_json()})


def serve_rank(socket_path: Path, comm: Intracomm | None) -> None:
    """Run this rank of the service behind `socket_path` to its end.

    Raises:
        RedKnotError: the engine or the configuration is refused; the front end is told first.
    """
    rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    channel = connect(socket_path)
    channel.send({"op": "hello", "rank": rank, "size": size})
    try:
        config = _configuration(channel)
        if rank == 0:
            _serve_first(config, comm, channel)
        else:
            _serve_other(config, comm, channel)
    except ChannelError:
        raise
    except RedKnotError as error:
        with contextlib.suppress(ChannelError):
            channel.send({"op": "failed", "message": str(error)})
        raise


def _configuration(channel: Channel) -> ServingConfig:
    message = channel.receive()
    if message is None or message.get("op") != "config":
        raise ChannelError("the front end sent no configuration", found=message)
    return validated_json(ServingConfig, message["config"], Path("the front end's message"))


def _serve_first(config: ServingConfig, comm: Intracomm | None, channel: Channel) -> None:
    from trt_redknot.serving.service import Service

    service = Service.open(config, comm)
    channel.send({"op": "ready"})
    end_when(lambda: service.health().state is State.UNHEALTHY, "the service is unhealthy")
    link = FrontEndLink(service, channel)
    try:
        link.run()
    finally:
        end_after(_GRACE_S, "the service does not close")
        service.close()
        link.join()


def _serve_other(config: ServingConfig, comm: Intracomm | None, channel: Channel) -> None:
    from trt_redknot.serving.worker import run_worker

    def gone() -> None:
        # Rank 0 sees the same end and tells the workers to leave; this is for when it cannot.
        with contextlib.suppress(ChannelError):
            channel.receive()
        end_after(_GRACE_S, "the front end is gone")

    threading.Thread(target=gone, daemon=True).start()
    run_worker(config, comm)


def end_after(seconds: float, reason: str) -> None:
    """End this process in `seconds` unless it ends by itself. A thread stuck in a collective cannot prevent it."""

    def end() -> None:
        time.sleep(seconds)
        _log.error("the rank is ended: %s", reason)
        os._exit(_FAILED_STATUS)

    threading.Thread(target=end, daemon=True).start()


def end_when(condition: Callable[[], bool], reason: str) -> None:
    """Watch `condition` in the background; once it holds, end this process after its events had time to leave."""

    def watch() -> None:
        while not condition():
            time.sleep(_HEALTH_S)
        end_after(_HEALTH_S, reason)

    threading.Thread(target=watch, daemon=True).start()
