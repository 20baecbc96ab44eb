"""Advisory file locks between processes. A lock ends with the process that holds it, however that process ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from trt_redknot.artifacts.files import Descriptor, Files, ensure_folder
from trt_redknot.errors import BusyError, StoreError

_POLL_S = 0.02
_MAX_HOLDER_BYTES = 4096
_LOCK_TABLE = Path("/proc/locks")


class FileLock:
    """A held flock. Close it to let go."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @property
    def fd(self) -> int:
        return self._descriptor.fd

    def close(self) -> None:
        self._descriptor.close()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take a flock without waiting. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(path: Path, fd: int) -> bool:
    """Whether `path` still names the open file or folder: it may have been replaced before it was locked."""
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def try_lock_path(path: Path, *, exclusive: bool) -> FileLock | None:
    """A lock on an existing file, or None where someone else holds it. OSError where it cannot be opened."""
    descriptor = Descriptor(_open(path))
    if try_lock(descriptor.fd, exclusive=exclusive):
        return FileLock(descriptor)
    descriptor.close()
    return None


def acquire(files: Files, path: Path, *, what: str, timeout_s: float) -> FileLock:
    """An exclusive lock on `path`, which is created where it is missing and names its holder.

    Raises:
        BusyError: nobody let go within `timeout_s` seconds; the holder is named.
        StoreError: the file cannot be locked.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            ensure_folder(files, path.parent)
            descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644))
            held = try_lock(descriptor.fd, exclusive=True)
            if held and is_at(path, descriptor.fd):
                _name_holder(descriptor.fd)
                return FileLock(descriptor)
        except OSError as error:
            raise StoreError(
                f"{what} cannot be locked: {error.strerror or error}",
                path=path,
                remedy="Check that the store's folder is writable and that its file system supports flock.",
            ) from error
        if not held and time.monotonic() >= deadline:
            raise BusyError(
                f"{what} stayed locked for {timeout_s:g} s",
                found=f"holder {_holder(descriptor.fd)}",
                path=path,
                remedy="Wait for that process, or end it: the lock ends with it.",
            )
        descriptor.close()
        time.sleep(_POLL_S)


def holders_at(path: Path) -> str:
    """Who holds a flock on `path`, for people, as far as this kernel says: process ids, or "unknown"."""
    try:
        status = path.stat(follow_symlinks=False)
        table = _LOCK_TABLE.read_text(encoding="ascii", errors="replace")
    except OSError:
        return "unknown"
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    pids = set()
    for line in table.splitlines():
        fields = line.split()
        # Waiters are marked by an arrow in the second field.
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == place:
            pids.add(fields[4])
    return ", ".join(f"pid {pid}" for pid in sorted(pids)) + f" on {socket.gethostname()}" if pids else "unknown"


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _name_holder(fd: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def _holder(fd: int) -> str:
    text = os.pread(fd, _MAX_HOLDER_BYTES, 0)
    try:
        holder = json.loads(text)
        return f"pid {int(holder['pid'])} on {str(holder['host'])[:128]} since {str(holder['since'])[:40]}"
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "unknown"
