"""What processes that were killed leave in shared memory, and its removal by the next one that starts.

Open MPI keeps a segment for each rank in /dev/shm. `mpirun` removes those of its ranks however they end; nobody does
where `mpirun` itself is killed with SIGKILL, or where a process uses MPI without `mpirun`. Triton keeps a region for
each Python model there, which stays when the server is killed. Such files occupy memory until somebody removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# First part of the names of the regions of servers that we start; their launcher's number and host follow.
TRITON_REGIONS = "redknot-triton"
# sm_segment.<host>.<user>.<job>.<rank>: the segments of Open MPI.
_SEGMENT = re.compile(r"sm_segment\.(?P<host>.+)\.(?P<user>\d+)\.[0-9a-f]+\.\d+")
# A file is mapped at once by the process that makes it: one that is older and that nobody maps belongs to the dead.
_YOUNG_S = 5.0


def region_prefix() -> str:
    """A name for the regions of the Triton server that this process starts."""
    return f"{TRITON_REGIONS}.{_host()}.{os.getpid()}."


def remove_leftovers(folder: Path = SHARED_MEMORY, *, young_s: float = _YOUNG_S) -> list[Path]:
    """Remove segments and regions of this user and host that no process maps any more; what was removed.

    Args:
        young_s: seconds that a file must be old.
    """
    candidates = [path for path in _own(folder) if _age_s(path) >= young_s]
    if not candidates:
        return []
    mapped = _mapped()
    removed = []
    for path in candidates:
        # Ranks that start together all come by; a folder that cannot be written to is somebody else's to clean.
        if str(path) not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed


def remove_regions(prefix: str, folder: Path = SHARED_MEMORY) -> None:
    """Remove the regions of a server that has ended. `prefix` is that of :func:`region_prefix`."""
    for path in _entries(folder):
        if path.name.startswith(prefix):
            with contextlib.suppress(OSError):
                path.unlink()


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
    """Seconds since its last change; of a file of another user, or one that is gone, none."""
    try:
        found = path.lstat()
    except OSError:
        return 0.0
    return time.time() - found.st_mtime if found.st_uid == os.geteuid() else 0.0


def _mapped() -> set[str]:
    """Paths of all files that processes of this user have mapped."""
    found: set[str] = set()
    for process in _entries(Path("/proc")):
        if process.name.isdecimal():
            # A process may end while it is looked at; those of other users have none of our files.
            with contextlib.suppress(OSError):
                for line in (process / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
                    found.add(line[line.find("/") :] if "/" in line else "")
    return found


def _host() -> str:
    return socket.gethostname().partition(".")[0]
