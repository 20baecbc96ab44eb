"""Several hosts on one store: safe where the file system carries locks between them, refused where it does not.

A local disk has one kernel, which sees every lock, whatever host name a container goes by. NFS, Ceph, GFS2, OCFS2 and
Lustre carry flock between hosts unless they are mounted so that they do not. On any other file system the store belongs
to one kernel, the first that used it; another one is told so and can take the store over.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from trt_redknot.artifacts.files import Descriptor, Files, ensure_folder, write_file
from trt_redknot.errors import StoreError

_MOUNTS = Path("/proc/self/mountinfo")
_KERNEL = Path("/proc/sys/kernel/random/boot_id")
_MAX_RECORD_BYTES = 4096
_LOCAL = frozenset(
    {
        *("bcachefs", "btrfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3"),
        *("overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs"),
    }
)
_SHARED = frozenset({"ceph", "gfs2", "lustre", "nfs", "nfs4", "ocfs2"})
_NOT_SHARED = frozenset({"nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock", "localflocks"})


class LockReach(StrEnum):
    """How far a flock reaches. KERNEL: this kernel's processes, and no other kernel can see the disk. HOSTS: all."""

    KERNEL = "kernel"
    HOSTS = "hosts"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of the mount table."""

    point: Path
    kind: str
    options: frozenset[str]

    @property
    def reach(self) -> LockReach:
        if self.kind in _LOCAL:
            return LockReach.KERNEL
        if self.kind in _SHARED and not self.options & _NOT_SHARED:
            return LockReach.HOSTS
        return LockReach.UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Host:
    """The kernel this process runs on. `name` is for people, `kernel` changes with every boot."""

    kernel: str
    name: str
    mount_of: Callable[[Path], Mount | None]

    @classmethod
    def here(cls) -> Host:
        try:
            kernel = _KERNEL.read_text(encoding="ascii").strip()
        except OSError:
            kernel = f"host {socket.gethostname()}"
        return cls(kernel=kernel, name=socket.gethostname(), mount_of=mount_of)


def mount_of(path: Path) -> Mount | None:
    """The mount that `path`, or its nearest parent that exists, lies on; None where the system does not say."""
    try:
        table = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return find_mount(table, path.resolve())


def find_mount(table: str, path: Path) -> Mount | None:
    """The last of the mounts in a mountinfo table whose mount point is the longest that holds `path`."""
    best: Mount | None = None
    for line in table.splitlines():
        left, found, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if not found or len(fields) < 6 or len(rest) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if path.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
            options = frozenset(fields[5].split(",")) | frozenset(rest[2].split(","))
            best = Mount(point=point, kind=rest[0], options=options)
    return best


class HostGuard:
    """Lets a store be used where its locks protect it, by one kernel alone elsewhere. Looks once for each object."""

    def __init__(self, root: Path, record: Path, *, files: Files, host: Host) -> None:
        self._root = root
        self._record = record
        self._files = files
        self._host = host
        self._passed = False

    def check(self, *, claim: bool) -> None:
        """Raise StoreError where another kernel uses this store and locks do not reach it.

        Args:
            claim: make the store this kernel's where it is nobody's; readers do not.
        """
        if self._passed:
            return
        if self.reach() is not LockReach.UNKNOWN:
            self._passed = True
            return
        owner = self._owner()
        if owner is None and claim:
            self._write()
            owner = self._owner()
        if owner is not None and owner.get("kernel") != self._host.kernel:
            raise self._refusal(owner)
        self._passed = claim

    def reach(self) -> LockReach:
        mount = self._host.mount_of(self._root)
        return LockReach.UNKNOWN if mount is None else mount.reach

    def adopt(self) -> None:
        """Make the store this kernel's. For people who know that no other host uses it any more. OSError passes."""
        beside = self._record.with_name(f"{self._record.name}.{os.getpid()}")
        ensure_folder(self._files, self._record.parent)
        write_file(self._files, beside, [self._content()])
        self._files.rename(beside, self._record)
        self._passed = False

    def _content(self) -> memoryview:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"kernel": self._host.kernel, "host": self._host.name, "since": since}
        return memoryview(json.dumps(record).encode())

    def _write(self) -> None:
        try:
            ensure_folder(self._files, self._record.parent)
            write_file(self._files, self._record, [self._content()])
        except FileExistsError:
            return
        except OSError as error:
            raise StoreError(
                f"the artifact store cannot be written: {error.strerror or error}", path=self._record
            ) from error

    def _owner(self) -> dict[str, object] | None:
        """None where the store is nobody's; an empty record where another kernel is just writing it."""
        try:
            with Descriptor(os.open(self._record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as target:
                record = json.loads(os.pread(target.fd, _MAX_RECORD_BYTES, 0))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}

    def _refusal(self, owner: dict[str, object]) -> StoreError:
        mount = self._host.mount_of(self._root)
        kind = "an unknown file system" if mount is None else f"{mount.kind} ({','.join(sorted(mount.options))})"
        return StoreError(
            f"the artifact store belongs to another host, and locks on {kind} are not known to reach it",
            expected=f"host {self._host.name}",
            found=f"host {owner.get('host', 'unknown')!s:.128} since {owner.get('since', 'unknown')!s:.40}",
            path=self._root,
            remedy="Mount it so that flock reaches all hosts, or, when that host (or boot) uses it no more: "
            "`artifacts adopt`.",
        )
