"""What processes that were killed leave in shared memory, and its removal by the next one that starts.

Open MPI keeps a segment for each rank in /dev/shm. `mpirun` removes those of its ranks however they end; nobody does
where `mpirun` itself is killed with SIGKILL, or where a process uses MPI without `mpirun`. Triton keeps a region for
each Python model there, which stays when the server is killed. Such files occupy memory until somebody removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# First part of the names of the regions of servers that we start; their launcher's number and host follow.
TRITON_REGIONS = "redknot-triton"
# sm_segment.<host>.<user>.<job>.<rank>: the segments of Open MPI.
_SEGMENT = re.compile(r"sm_segment\.(?P<host>.+)\.(?P<user>[0-9]+)\.[0-9a-f]+\.[0-9]+")
# A server makes a region before its model's process has it: only what is older and in nobody's hands is of the dead.
_YOUNG_S = 5.0


def region_prefix() -> str:
    """A name for the regions of the Triton server that this process starts."""
    return f"{TRITON_REGIONS}.{_host()}.{os.getpid()}."


def remove_leftovers(folder: Path = SHARED_MEMORY, *, young_s: float = _YOUNG_S) -> list[Path]:
    """Remove segments and regions of this user and host that no process uses any more; what was removed.

    Args:
        young_s: seconds that a file must be old.
    """
    return [path for path in _own(folder) if _age_s(path) >= young_s and _remove_unused(path)]


def remove_regions(prefix: str, folder: Path = SHARED_MEMORY) -> None:
    """Remove the regions of a server that has ended. `prefix` is that of :func:`region_prefix`."""
    for path in _entries(folder):
        if path.name.startswith(prefix):
            _remove_unused(path)


def _own(folder: Path) -> Iterator[Path]:
    for path in _entries(folder):
        segment = _SEGMENT.fullmatch(path.name)
        if segment is not None:
            ours = segment["host"].partition(".")[0] == _host() and int(segment["user"]) == os.geteuid()
        else:
            ours = path.name.startswith(f"{TRITON_REGIONS}.{_host()}.")
        if ours:
            yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        # Another system, or no shared memory: then nothing was left there either.
        return []


def _age_s(path: Path) -> float:
    """Seconds since its last change; of one that is gone, none."""
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _remove_unused(path: Path) -> bool:
    """Remove a file of this user that no process has open or mapped for writing; whether it was."""
    # Ranks that start together all come by; a folder that cannot be written to is somebody else's to clean.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                # Whoever opens the file while the lease is held is told of by a signal, which by default would end us.
                fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
                # Refused where any process has it: also one that /proc hides, as in another container with this folder.
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                path.unlink()
                return True
        finally:
            os.close(descriptor)
    return False


def _host() -> str:
    return socket.gethostname().partition(".")[0]
