"""What people do to a store: list, inspect, verify, remove, pin, collect. Base of :class:`ArtifactStore`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trt_redknot.artifacts.capacity import Orphans, collect_orphans, reserved_bytes
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import real_folders, tree_bytes, write_file
from trt_redknot.artifacts.folder import PIN_FILE, Published, StoreFolder
from trt_redknot.artifacts.locks import holders_at, is_at, try_lock_path
from trt_redknot.artifacts.names import LEASE_LOCK
from trt_redknot.artifacts.quarantine import set_aside
from trt_redknot.artifacts.quota import effective_capacity, write_quota
from trt_redknot.artifacts.records import Collected, Listed, StoreStatus, Verdict
from trt_redknot.artifacts.verification import faults_of
from trt_redknot.errors import StoreError


class Maintenance:
    """Operations that need no engine. Every OSError leaves as StoreError with the file's name."""

    def __init__(self, folder: StoreFolder, capacity_bytes: int | None) -> None:
        self._folder = folder
        self.capacity_bytes = capacity_bytes

    def require(self) -> None:
        """Raise StoreError unless something was ever built here: for people who may have mistyped a folder's name."""
        folder = self._folder
        if not folder.locks.is_dir():
            raise StoreError(
                "there is no artifact store", path=folder.root, remedy="Name the folder that artifacts were built into."
            )
        if not folder.home.is_dir():
            names = [found.name for found in real_folders(folder.root) if not found.name.startswith(".")]
            raise StoreError("the artifact store has no such namespace", expected=names, found=folder.namespace)

    def ls(self) -> list[Listed]:
        """All published generations of this namespace."""
        with _as_store_error(self._folder.root), self._undisturbing():
            return [self._listed(found) for found in self._folder.all_published()]

    def inspect(self, artifact_id: str) -> list[Listed]:
        """The published generations of one artifact; StoreError where there is none."""
        with _as_store_error(self._folder.root), self._undisturbing():
            return [self._listed(found) for found in self._require(artifact_id)]

    def verify(self, artifact_id: str | None = None, *, quarantine: bool = True) -> list[Verdict]:
        """Compare every file of the published generations with their certificates, always reading all of them.

        Corrupt generations are moved into quarantine unless they are leased or `quarantine` is off. What is being read
        is leased; what somebody removes meanwhile has no verdict.
        """
        with _as_store_error(self._folder.root):
            ids = self._folder.artifact_ids() if artifact_id is None else [artifact_id]
            published = [found for each in ids for found in self._folder.published(each, certified=False)]
            if artifact_id is not None and not published:
                raise self._missing(artifact_id)
            verdicts = (self._verdict(found, quarantine) for found in published)
            return [verdict for verdict in verdicts if verdict is not None]

    def quarantine(self, artifact_id: str, generation: int, reason: str) -> Path | None:
        """Move one generation out of the way; None where it is leased or not there (any more)."""
        with _as_store_error(self._folder.root):
            for found in self._folder.published(artifact_id, certified=False):
                if found.generation == generation:
                    return set_aside(self._folder, found, reason)
        return None

    def quarantined(self, artifact_id: str) -> list[Path]:
        """Folders in quarantine of one artifact; each holds a generation and a reason."""
        with _as_store_error(self._folder.root):
            return list(self._folder.quarantined(artifact_id))

    def rm(self, artifact_id: str, *, generation: int | None = None) -> list[Published]:
        """Remove an artifact, or one generation of it.

        Raises:
            StoreError: there is none, it is pinned, or it is leased (nothing is removed then).
        """
        with _as_store_error(self._folder.root), contextlib.ExitStack() as held:
            held.enter_context(self._folder.mutex())
            doomed = [found for found in self._require(artifact_id) if generation in (None, found.generation)]
            if not doomed:
                raise self._missing(artifact_id)
            for found in doomed:
                if found.pinned:
                    raise StoreError(f"artifact {artifact_id} is pinned", path=found.path, remedy="Unpin it first.")
                with contextlib.suppress(FileNotFoundError):
                    lock = self._folder.try_own(found.path)
                    if lock is None:
                        raise StoreError(
                            f"artifact {artifact_id} is in use",
                            found=f"holder {holders_at(found.path / LEASE_LOCK)}",
                            path=found.path,
                            remedy="Wait until its readers end.",
                        )
                    held.enter_context(lock)
            for found in doomed:
                self._folder.discard(found.path)
            self._drop_if_empty(artifact_id)
            return doomed

    def pin(self, artifact_id: str) -> None:
        """Keep all generations of an artifact from eviction, gc and rm. StoreError where there is none."""
        with _as_store_error(self._folder.root), self._folder.mutex():
            self._require(artifact_id)
            with contextlib.suppress(FileExistsError):
                write_file(self._folder.files, self._folder.artifact(artifact_id) / PIN_FILE, [])

    def unpin(self, artifact_id: str) -> None:
        """Undo `pin`; nothing happens where it is not pinned. StoreError where there is no such artifact."""
        with _as_store_error(self._folder.root), self._folder.mutex():
            self._require(artifact_id)
            with contextlib.suppress(FileNotFoundError):
                self._folder.files.remove(self._folder.artifact(artifact_id) / PIN_FILE)

    def set_quota(self, quota: int | None) -> None:
        """Bind every process to `quota` bytes in this namespace, None: to none. Nothing is evicted before a build
        needs room. StoreError where it is not positive."""
        with _as_store_error(self._folder.root), self._folder.mutex():
            write_quota(self._folder, quota)

    def adopt(self) -> None:
        """Make the store this host's where locks do not reach the one that used it (see `hosts.py`)."""
        with _as_store_error(self._folder.root):
            self._folder.hosts.adopt()

    def gc(self, *, quarantine: bool = False) -> Collected:
        """Remove dead builds, the trash, superseded generations and empty folders; on request the quarantine too.

        What is leased, pinned or being built stays.
        """
        folder = self._folder
        with _as_store_error(folder.root):
            if not folder.root.is_dir():
                return Collected(
                    orphans=Orphans(folders=0, bytes=0),
                    superseded=0,
                    superseded_bytes=0,
                    quarantined=0,
                    quarantined_bytes=0,
                )
            with folder.mutex():
                orphans = collect_orphans(folder)
                superseded = [found for found in folder.all_published(certified=False) if self._collect(found)]
                doomed = list(self._folder.quarantined()) if quarantine else []
                aside_bytes = sum(tree_bytes(place) for place in doomed)
                for place in doomed:
                    folder.files.remove_tree(place)
                for artifact_id in list(folder.artifact_ids()):
                    self._drop_if_empty(artifact_id)
        return Collected(
            orphans=orphans,
            superseded=len(superseded),
            superseded_bytes=sum(found.bytes for found in superseded),
            quarantined=len(doomed),
            quarantined_bytes=aside_bytes,
        )

    def stat(self) -> StoreStatus:
        """Totals of this namespace."""
        with _as_store_error(self._folder.root):
            published = self._folder.all_published()
            present = self._folder.root.is_dir()
            return StoreStatus(
                root=self._folder.root,
                namespace=self._folder.namespace,
                artifacts=len({found.artifact_id for found in published}),
                generations=len(published),
                bytes=sum(found.bytes for found in published),
                pinned_bytes=sum(found.bytes for found in published if found.pinned),
                reserved_bytes=reserved_bytes(self._folder),
                capacity_bytes=effective_capacity(self._folder, self.capacity_bytes),
                quarantined=len(list(self._folder.quarantined())),
                disk_free_bytes=shutil.disk_usage(self._folder.root).free if present else None,
            )

    @contextlib.contextmanager
    def _undisturbing(self) -> Iterator[None]:
        """Looking for leases takes their locks for a moment, which must not look like a reader to who evicts."""
        with contextlib.ExitStack() as held:
            if self._folder.locks.is_dir():
                # Where the store may only be read, nobody can evict or remove with our permissions anyway.
                with contextlib.suppress(StoreError):
                    held.enter_context(self._folder.mutex())
            yield

    def _require(self, artifact_id: str) -> list[Published]:
        found = self._folder.published(artifact_id)
        if not found:
            raise self._missing(artifact_id)
        return found

    def _missing(self, artifact_id: str) -> ArtifactError:
        return ArtifactError(
            ArtifactFault.MISSING,
            f"the artifact store has no artifact {artifact_id[:64]}",
            path=self._folder.home,
            remedy="`artifacts ls` shows what is there; check the namespace too.",
        )

    def _listed(self, found: Published) -> Listed:
        certificate, fault = None, None
        try:
            with self._folder.open_generation(found) as folder:
                certificate = self._folder.read_certificate(folder.fd, found.artifact_id, found.generation)
        except ArtifactError as error:
            fault = str(error)
        return Listed(published=found, leased=self._is_leased(found), certificate=certificate, fault=fault)

    def _is_leased(self, found: Published) -> bool:
        try:
            lock = self._folder.try_own(found.path)
        except OSError:
            return False
        if lock is None:
            return True
        lock.close()
        return False

    def _verdict(self, found: Published, quarantine: bool) -> Verdict | None:
        with contextlib.ExitStack() as held:
            path = found.path / LEASE_LOCK
            # Without a lock file it is corrupt, and nobody can remove it in the ordinary way while it is read.
            with contextlib.suppress(OSError):
                lock = try_lock_path(path, exclusive=False)
                if lock is None or not is_at(path, held.enter_context(lock).fd):
                    return None
            if not os.path.lexists(found.path):
                return None
            faults = tuple(faults_of(self._folder, found))
        place = set_aside(self._folder, found, "; ".join(faults)) if faults and quarantine else None
        return Verdict(
            artifact_id=found.artifact_id,
            generation=found.generation,
            bytes=found.bytes,
            faults=faults,
            quarantined=place,
        )

    def _collect(self, found: Published) -> bool:
        if not found.superseded or found.pinned:
            return False
        with contextlib.ExitStack() as held:
            with contextlib.suppress(FileNotFoundError):
                lock = self._folder.try_own(found.path)
                if lock is None:
                    return False
                held.enter_context(lock)
            self._folder.discard(found.path)
        return True

    def _drop_if_empty(self, artifact_id: str) -> None:
        folder = self._folder.artifact(artifact_id)
        if self._folder.generations(artifact_id, certified=False):
            return
        with contextlib.suppress(OSError):
            self._folder.files.remove_folder(folder)


@contextlib.contextmanager
def _as_store_error(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the artifact store cannot be used: {error.strerror or error}",
            path=error.filename or root,
            remedy="Check the permissions of the store's folder, and that its disk works.",
        ) from error
