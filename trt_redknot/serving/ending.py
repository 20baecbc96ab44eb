"""How a server is ended at once: its launcher tells the front ends, which fail what is open and end their ranks.

Told to end, Triton waits for open requests, and for clients that keep a connection, as long as its exit timeout allows:
right for SIGTERM, too long for somebody who pressed Ctrl-C. It has no signal for the other way, and one that is sent to
a front end does not reach Python while that process is inside of Triton's code. So each front end has a socket to the
launcher.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from trt_redknot.serving.socket import Channel, ChannelError, Listener, connect

# Names the launcher's socket in the environment of the server, which front ends inherit.
VARIABLE = "TRT_REDKNOT_LAUNCHER"
_ACCEPT_S = 0.2


class FrontEnds:
    """The launcher's side: connections to the front ends of its server."""

    def __init__(self) -> None:
        self._listener = Listener()
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """For the server."""
        return {VARIABLE: str(self._listener.path)}

    @property
    def connected(self) -> int:
        """Front ends that have connected."""
        with self._lock:
            return len(self._channels)

    def end(self, timeout_s: float) -> None:
        """Tell all front ends to end their services, and wait until they have."""
        with self._lock:
            channels = list(self._channels)
        threads = [threading.Thread(target=_end, args=(channel,), daemon=True) for channel in channels]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()
        for channel in self._channels:
            channel.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            # A process of another user is refused, and the next one waited for.
            with contextlib.suppress(ChannelError):
                channel = self._listener.accept(_ACCEPT_S)
                if channel is not None:
                    with self._lock:
                        self._channels.append(channel)


def _end(channel: Channel) -> None:
    with contextlib.suppress(ChannelError):
        channel.send({"op": "end"})
        # Its end is the answer.
        channel.receive()


def end_on_word(environment: Mapping[str, str], close: Callable[[], None]) -> Callable[[], None]:
    """A front end's side: wait for the launcher's word in a thread, and call `close` there.

    Nothing happens where no launcher of ours started the server, or where it dies: its server then ends in its own way.

    Returns:
        what a thread calls that would disturb that: it returns when a word that came has been followed.
    """
    path = environment.get(VARIABLE)
    try:
        channel = None if path is None else connect(path)
    except ChannelError:
        channel = None
    if channel is None:
        return lambda: None
    told = threading.Event()

    def wait() -> None:
        try:
            with contextlib.suppress(ChannelError):
                if channel.receive() is not None:
                    told.set()
                    close()
        finally:
            # The launcher waits for this end, also of a service that could not close.
            channel.close()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()

    def follow() -> None:
        if told.is_set():
            thread.join()

    return follow
