"""Room in the store: what is taken, what may go, and the refusal that names the numbers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_redknot.artifacts.files import real_folders, tree_bytes
from trt_redknot.artifacts.folder import BUILD_LOCK, RESERVATION, Published, StoreFolder
from trt_redknot.artifacts.locks import FileLock, try_lock_path
from trt_redknot.errors import CapacityError


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """What gc collected that was no longer anybody's: count and bytes."""

    folders: int
    bytes: int


def make_room(store: StoreFolder, needed: int, capacity: int | None) -> tuple[Published, ...]:
    """Evict, least recently used first, until `needed` bytes fit into the capacity. The caller holds the mutex.

    Superseded generations go first. Pinned and leased ones stay. Nothing is evicted where that would not be enough.

    Raises:
        CapacityError: there is no room, in the quota or on the disk. OSError passes.
    """
    evicted: tuple[Published, ...] = ()
    if capacity is not None:
        if needed > capacity:
            raise CapacityError(
                "the artifact is larger than the store's capacity",
                expected=f"at most {capacity} bytes",
                found=f"{needed} bytes",
                path=store.root,
                remedy="Give the store more capacity, or split the document.",
            )
        evicted = _evict(store, needed, capacity)
    free = shutil.disk_usage(store.root).free
    if needed > free:
        raise CapacityError(
            "the disk has no room for the artifact",
            expected=f"{needed} bytes free",
            found=f"{free} bytes free",
            path=store.root,
            remedy="Free disk space, or remove artifacts with `artifacts rm`.",
        )
    return evicted


def reserved_bytes(store: StoreFolder) -> int:
    """Bytes that running builds of this namespace have been promised."""
    total = 0
    for folder in real_folders(store.building):
        note = store.read_note(folder / RESERVATION)
        promised = note.get("bytes")
        if note.get("namespace") == store.namespace and isinstance(promised, int) and promised > 0:
            total += promised
    return total


def collect_orphans(store: StoreFolder) -> Orphans:
    """Delete builds whose builder is dead and what lies in the trash. The caller holds the mutex. OSError passes."""
    folders = total = 0
    for folder in [*real_folders(store.building), *real_folders(store.trash)]:
        if folder.parent == store.building and _is_alive(folder):
            continue
        size = tree_bytes(folder)
        store.files.remove_tree(folder)
        folders += 1
        total += size
    return Orphans(folders=folders, bytes=total)


def _is_alive(build: Path) -> bool:
    try:
        lock = try_lock_path(build / BUILD_LOCK, exclusive=True)
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.close()
    return False


def _evict(store: StoreFolder, needed: int, capacity: int) -> tuple[Published, ...]:
    present = store.all_published(certified=False)
    taken = sum(found.bytes for found in present) + reserved_bytes(store)
    if taken + needed <= capacity:
        return ()
    collect_orphans(store)
    reserved = reserved_bytes(store)
    taken = sum(found.bytes for found in present) + reserved
    candidates = sorted(
        (found for found in present if not found.pinned),
        key=lambda found: (not found.superseded, found.last_used, found.artifact_id, found.generation),
    )
    chosen, locks = _choose(store, candidates, taken + needed - capacity)
    try:
        freed = sum(found.bytes for found in chosen)
        if taken - freed + needed > capacity:
            raise _no_room(store, needed, capacity, taken, reserved, present, freed)
        for found in chosen:
            store.discard(found.path)
    finally:
        for lock in locks:
            lock.close()
    return tuple(chosen)


def _choose(store: StoreFolder, candidates: Sequence[Published], excess: int) -> tuple[list[Published], list[FileLock]]:
    chosen: list[Published] = []
    locks: list[FileLock] = []
    for found in candidates:
        if excess <= 0:
            break
        try:
            lock = store.try_own(found.path)
        except FileNotFoundError:
            # Without its lock file nobody can lease it.
            chosen.append(found)
            excess -= found.bytes
            continue
        if lock is not None:
            locks.append(lock)
            chosen.append(found)
            excess -= found.bytes
    return chosen, locks


def _no_room(
    store: StoreFolder,
    needed: int,
    capacity: int,
    taken: int,
    reserved: int,
    present: Sequence[Published],
    evictable: int,
) -> CapacityError:
    pinned = sum(found.bytes for found in present if found.pinned)
    return CapacityError(
        "the artifact store has no room",
        expected=f"{needed} bytes of a capacity of {capacity}",
        found=f"{taken} taken, of which {pinned} pinned, {reserved} reserved by running builds, {evictable} evictable",
        path=store.root,
        remedy="Give the store more capacity, unpin or remove artifacts, or wait for leases to end.",
    )
