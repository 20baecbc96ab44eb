"""The hidden folder that an engine is written into before it is published, and those that killed builds left behind.

A build holds a lock on its folder for as long as its process lives. A folder that nobody holds is nobody's: the next
build of the same output removes it. Where locks do not reach other hosts, only people can tell, and it stays.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from trt_redknot.artifacts.files import Descriptor
from trt_redknot.artifacts.hosts import LockReach, mount_of
from trt_redknot.artifacts.locks import FileLock, is_at, try_lock

_TRIES = 16


@dataclass(frozen=True, kw_only=True)
class Staging:
    """A folder to write into, ours until `lock` is closed.

    Attributes:
        lock: None where the file system has no locks.
    """

    path: Path
    lock: FileLock | None

    def remove(self) -> None:
        """Remove what is still there, and let go."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock is not None:
            self.lock.close()


def open_staging(output: Path) -> Staging:
    """A fresh folder beside `output`. Raises OSError where it cannot be made."""
    for _ in range(_TRIES):
        path = output.parent / f"{_prefix(output)}{uuid.uuid4().hex[:12]}"
        path.mkdir(parents=True)
        try:
            lock = _try_hold(path)
        except OSError:
            return Staging(path=path, lock=None)
        # Between the two, another build may have taken it for a folder that nobody holds.
        if lock is not None:
            return Staging(path=path, lock=lock)
    raise FileExistsError(f"{_TRIES} new folders were all taken by others")


def remove_stale(output: Path) -> list[Path]:
    """Remove the folders that killed builds of `output` left behind. What cannot be removed stays.

    Returns:
        the folders that are gone.
    """
    gone = []
    for path in _left_behind(output):
        try:
            lock = _try_hold(path)
        except OSError:
            continue
        if lock is None:
            continue
        with closing(lock):
            shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            gone.append(path)
    return gone


def _prefix(output: Path) -> str:
    return f".{output.name}.building-"


def _left_behind(output: Path) -> Iterator[Path]:
    mount = mount_of(output.parent) if output.parent.is_dir() else None
    if mount is None or mount.reach is LockReach.UNKNOWN:
        return
    for path in sorted(output.parent.iterdir()):
        if path.name.startswith(_prefix(output)) and path.is_dir() and not path.is_symlink():
            yield path


def _try_hold(path: Path) -> FileLock | None:
    """A lock on a folder; None where someone holds it, or where it is gone. OSError where there are no locks."""
    try:
        descriptor = Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
    except FileNotFoundError:
        return None
    try:
        held = try_lock(descriptor.fd, exclusive=True) and is_at(path, descriptor.fd)
    except OSError:
        descriptor.close()
        raise
    if held:
        return FileLock(descriptor)
    descriptor.close()
    return None
