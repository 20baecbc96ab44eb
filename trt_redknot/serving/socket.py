"""JSON objects over a unix socket: how the front end of a service and its ranks talk.

A frame is its length, four bytes, big endian, then that many bytes of a JSON object in UTF-8. The listening end makes
the socket in a folder that only its user may enter, and both ends refuse a peer of another user. A frame's length is
compared with a limit before anything is allocated; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_redknot.config.documents import parse_json_object
from trt_redknot.errors import RedKnotError

# A request of 440K tokens as JSON numbers takes about 3 MB; a whole answer with its report, far less.
MAX_FRAME_BYTES = 64 << 20
_HEADER = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")
# Linux keeps 108 bytes for the path of a unix socket, its closing zero included.
_MAX_PATH_BYTES = 107
# Of a folder for temporary files in which the folder of a listener can be made.
MAX_TEMPORARY_BYTES = _MAX_PATH_BYTES - len("/redknot-01234567/service.sock")


class ChannelError(RedKnotError):
    """The other end is gone, is somebody else, or sent what is not a frame."""

    exit_code = 3


class TooLargeError(ChannelError):
    """An object is larger than a frame may be. Nothing of it was sent, and the channel goes on."""


class Channel:
    """One end of a connection. Any thread may send; one thread receives.

    Args:
        limit: bytes of a frame at most, in both directions.
    """

    def __init__(self, connection: socket.socket, *, limit: int = MAX_FRAME_BYTES) -> None:
        self._socket = connection
        self._limit = limit
        self._sending = threading.Lock()
        self.peer = _peer(connection)

    def send(self, message: Mapping[str, object]) -> None:
        """Send one object, whole.

        Raises:
            ChannelError: the other end is gone.
            TooLargeError: the object is larger than a frame may be.
        """
        content = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        if len(content) > self._limit:
            raise TooLargeError("a message is too large", expected=f"at most {self._limit} bytes", found=len(content))
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(content)) + content)
        except OSError as error:
            raise ChannelError(f"the other end is gone: {error.strerror or error}") from error

    def receive(self) -> dict[str, Any] | None:
        """The next object; None when the other end has closed between two frames.

        Raises:
            ChannelError: closed inside a frame, a length over the limit, or not a JSON object.
        """
        header = self._read(_HEADER.size)
        if not header:
            return None
        (length,) = _HEADER.unpack(header)
        if length > self._limit:
            raise ChannelError("a frame is too large", expected=f"at most {self._limit} bytes", found=length)
        content = self._read(length)
        if len(content) != length:
            raise ChannelError("the connection ended inside a frame", expected=f"{length} bytes", found=len(content))
        try:
            return parse_json_object(content)
        except ValueError as error:
            raise ChannelError("a frame is ill-formed", found=error) from error

    def _read(self, count: int) -> bytes:
        """`count` bytes, or none where the other end closed before the first."""
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(min(count - len(parts), 1 << 20))
            except OSError as error:
                if not parts:
                    return b""
                raise ChannelError(f"the connection ended inside a frame: {error.strerror or error}") from error
            if not part:
                if not parts:
                    return b""
                raise ChannelError("the connection ended inside a frame", expected=f"{count} bytes", found=len(parts))
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """End the connection; a thread that receives at this moment sees its end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """A unix socket in a new folder of its own, which `close` removes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="redknot-")
        self.path = Path(self._folder.name) / "service.sock"
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            self._folder.cleanup()
            raise ChannelError(
                "the folder for temporary files has too long a name for a socket in it",
                expected=f"at most {_MAX_PATH_BYTES} bytes", path=self.path, remedy="Set TMPDIR to a shorter one.",
            )  # fmt: skip
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self.path))
            self._socket.listen(128)
        except OSError as error:
            self.close()
            raise ChannelError(f"no socket can be made: {error.strerror or error}", path=self.path) from error

    def accept(self, timeout_s: float) -> Channel | None:
        """The next connection of this user's processes; None when none came in time.

        Raises:
            ChannelError: a process of another user connected, or the listener was closed.
        """
        try:
            if not readable(self._socket.fileno(), timeout_s):
                return None
            connection, _ = self._socket.accept()
        except (OSError, ValueError) as error:
            raise ChannelError("the socket was closed", path=self.path) from error
        return _own(connection)

    def close(self) -> None:
        self._socket.close()
        self._folder.cleanup()


def readable(descriptor: int, timeout_s: float) -> bool:
    """Whether a file descriptor, which may have any number, gets something to read in time.

    Raises:
        ValueError: it is negative, as that of a closed socket.
    """
    # Not select, which refuses numbers from 1024 on, as a process with many connections gives.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def connect(path: Path | str) -> Channel:
    """A connection to a listener.

    Raises:
        ChannelError: nobody listens there, or somebody else does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise ChannelError(f"nobody listens: {error.strerror or error}", path=path) from error
    return _own(connection)


def _own(connection: socket.socket) -> Channel:
    channel = Channel(connection)
    _, user = channel.peer
    if user != os.geteuid():
        channel.close()
        raise ChannelError("the other end belongs to another user", expected=os.geteuid(), found=user)
    return channel


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(content)
    return process, user
