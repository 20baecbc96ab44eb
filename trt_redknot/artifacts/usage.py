"""When an artifact was last used: the time of its lease lock, never before another use."""

from __future__ import annotations

import contextlib
import os
import time

from trt_redknot.artifacts.files import Descriptor
from trt_redknot.artifacts.folder import StoreFolder

# Coarser than the times that file systems keep.
_TICK_NS = 1_000


def record_use(store: StoreFolder, fd: int) -> None:
    """Make an open lease lock the latest used of the store, also after the clock was moved back.

    A store that may only be read cannot record use; it is not the one that evicts either.
    """
    at = time.time_ns()
    with contextlib.suppress(OSError):
        path = store.locks / "clock"
        with Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)) as clock:
            at = max(at, os.fstat(clock.fd).st_mtime_ns + _TICK_NS)
            store.files.touch(clock.fd, at)
    with contextlib.suppress(OSError):
        store.files.touch(fd, at)
