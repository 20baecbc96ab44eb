"""The checks of `doctor --store`: the folder, its locks, what lies in it. They change nothing."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trt_redknot.artifacts.files import real_folders
from trt_redknot.artifacts.hosts import LockReach, mount_of
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.cli.checks import Check, Status
from trt_redknot.errors import StoreError

_REACH = {
    LockReach.KERNEL: "seen by every process of this machine",
    LockReach.HOSTS: "carried to all hosts that mount it",
    LockReach.UNKNOWN: "not known to reach other hosts",
}


def check_store(root: Path) -> Iterator[Check]:
    """Locks of the file system and totals of every namespace. Nothing where the folder is not there yet."""
    if not root.is_dir():
        return
    yield check_locks(root)
    for folder in real_folders(root):
        if not folder.name.startswith("."):
            yield check_namespace(root, folder.name)


def check_locks(root: Path) -> Check:
    """Whether flock works on the store's file system, and between which hosts."""
    mount = mount_of(root)
    kind = "unknown file system" if mount is None else mount.kind
    reach = LockReach.UNKNOWN if mount is None else mount.reach
    try:
        with tempfile.TemporaryFile(dir=root) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        remedy = "Artifacts need a file system with flock: move the store to one."
        return Check(name="store locks", status=Status.FAIL, found=f"{kind}: {error.strerror or error}", remedy=remedy)
    found = f"{kind}: locks are {_REACH[reach]}"
    if reach is LockReach.UNKNOWN:
        remedy = "Use this store from one host, or mount it so that flock reaches all of them (docs/reliability.md)."
        return Check(name="store locks", status=Status.WARN, found=found, remedy=remedy)
    return Check(name="store locks", status=Status.OK, found=found)


def check_namespace(root: Path, namespace: str) -> Check:
    """Totals of one namespace; a warning where something lies in quarantine."""
    name = f"store namespace {namespace}"
    try:
        status = ArtifactStore(root, namespace=namespace).stat()
    except StoreError as error:
        return Check(name=name, status=Status.FAIL, found=error.problem, remedy=str(error.remedy or error))
    quota = "no quota" if status.capacity_bytes is None else f"quota {status.capacity_bytes} bytes"
    found = f"{status.artifacts} artifacts, {status.bytes} bytes, {quota}, {status.quarantined} in quarantine"
    if status.quarantined:
        remedy = "Read why in .quarantine/*/reason.json, then: artifacts gc --quarantine"
        return Check(name=name, status=Status.WARN, found=found, remedy=remedy)
    return Check(name=name, status=Status.OK, found=found)
