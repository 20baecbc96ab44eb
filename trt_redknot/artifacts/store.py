"""The artifact store: find, open, build. Everything it knows it reads from disk; see docs/artifact-format.md."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from trt_redknot.artifacts.agreement import agree
from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.capacity import make_room
from trt_redknot.artifacts.certificate import (
    Certificate,
    CertifiedFile,
    certificate_bytes,
    certified_ranks,
)
from trt_redknot.artifacts.contents import LAYERS_PER_GROUP
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Descriptor, Files, ensure_folder, sync_folder, write_file
from trt_redknot.artifacts.folder import (
    ARTIFACT_ID_PATTERN,
    BUILD_LOCK,
    GENERATION_FOLDER,
    RESERVATION,
    StoreFolder,
    generation_name,
)
from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry, artifact_id_of
from trt_redknot.artifacts.layout import LEASE_LOCK, TOKENS, TOKENS_FILE, FilePlan, data_bytes, plan_files
from trt_redknot.artifacts.lease import Lease, VerifiedFiles, nothing_between
from trt_redknot.artifacts.locks import FileLock, try_lock
from trt_redknot.artifacts.maintenance import Maintenance
from trt_redknot.artifacts.tensorfile import TensorFile
from trt_redknot.collectives.base import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_tokens
from trt_redknot.errors import CollectiveError, RedKnotError, RequestError, StoreError

_POLL_S = 0.01


class ArtifactStore(Maintenance):
    """A folder of artifacts, shared by any number of processes.

    Args:
        root: the store's folder. It is created by the first build.
        capacity_bytes: quota of this namespace, artifacts and running builds together; None: only the disk limits it.
        namespace: the tenant. It is part of every artifact's id, so tenants never see each other's artifacts.
        files: the file system; tests hand in one that fails.
        lock_timeout_s: seconds to wait for another process's short change before StoreError names the holder.

    Raises:
        StoreError: `root` is not a folder, `namespace` is not a name, `capacity_bytes` is not positive.
    """

    def __init__(
        self,
        root: Path | str,
        capacity_bytes: int | None = None,
        namespace: str = "default",
        *,
        files: Files | None = None,
        lock_timeout_s: float = 30.0,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise StoreError("the store's capacity is not positive", expected="bytes > 0", found=capacity_bytes)
        folder = StoreFolder(Path(root), namespace, files=files or Files(), lock_timeout_s=lock_timeout_s)
        super().__init__(folder, capacity_bytes)
        self._verified = VerifiedFiles()

    @property
    def root(self) -> Path:
        return self._folder.root

    @property
    def namespace(self) -> str:
        return self._folder.namespace

    def artifact_id(self, tokens: Sequence[int] | NDArray[np.int64], identity: ArtifactIdentity) -> str:
        """The id that the artifact of these tokens has in this namespace, built or not."""
        return artifact_id_of(self.namespace, digest_tokens(np.asarray(tokens, dtype=np.int64)), identity)

    def find(self, artifact_id: str, *, identity: ArtifactIdentity, tp: TpGeometry) -> Certificate | None:
        """The newest generation's certificate where it fits this engine and all files have their size, else None."""
        try:
            with self.open(artifact_id, verify=False) as lease:
                certificate = lease.certificate
                if certificate.identity != identity or certificate.ranks != certified_ranks(tp):
                    return None
                lease.check_sizes()
                return certificate
        except ArtifactError:
            return None

    def open(
        self,
        artifact_id: str,
        *,
        rank: int | None = None,
        generation: int | None = None,
        verify: bool = True,
        timeout_s: float | None = None,
        between: Callable[[], None] = nothing_between,
    ) -> Lease:
        """Lease a generation, by default the newest published one.

        Args:
            rank: whose Local contributions will be read.
            verify: check all files this rank needs now; otherwise each file is checked when it is first read.
            timeout_s: seconds to wait for a process that is removing it; left out: the store's `lock_timeout_s`.
            between: called between files and chunks while verifying; what it raises passes through.

        Raises:
            ArtifactError: there is none, or it is corrupt.
            StoreError: it cannot be locked.
        """
        lease = self._lease(artifact_id, rank, generation, timeout_s)
        try:
            if verify:
                lease.verify(between)
        except BaseException:
            lease.close()
            raise
        return lease

    def newest(self, artifact_id: str) -> int | None:
        """The newest generation that has a certificate, None where there is none."""
        return max(self._folder.generations(artifact_id), default=None)

    def read_tokens(self, artifact_id: str, identity: ArtifactIdentity) -> NDArray[np.int64] | None:
        """A document's token ids although its artifact may be corrupt: ids that give this artifact id prove themselves.

        Looks at every generation, the quarantine included, and needs no certificate. None where nothing proves itself.
        """
        store = self._folder
        if not ARTIFACT_ID_PATTERN.fullmatch(artifact_id):
            return None
        numbers = reversed(store.generations(artifact_id, certified=False))
        places = [store.generation(artifact_id, number) for number in numbers]
        places += [place / GENERATION_FOLDER for place in store.quarantined(artifact_id)]
        for place in places:
            try:
                ids = self._unproved_tokens(place)
            except (ArtifactError, OSError):
                continue
            if artifact_id_of(self.namespace, digest_tokens(ids), identity) == artifact_id:
                return ids
        return None

    def _unproved_tokens(self, place: Path) -> NDArray[np.int64]:
        files = self._folder.files
        with self._folder.open_root() as root:
            parts = (*place.relative_to(self.root).parts, TOKENS_FILE)
            target = Descriptor(files.open_beneath(root.fd, parts, os.O_RDONLY | os.O_NONBLOCK))
        with target:
            file = TensorFile(target.fd, os.fstat(target.fd).st_size, label=str(place / TOKENS_FILE), files=files)
            ids: NDArray[np.int64] = file.tensor(TOKENS).to(torch.int64).reshape(-1).numpy().copy()
            return ids

    def begin(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        *,
        identity: ArtifactIdentity,
        geometry: ModelGeometry,
        profile: SplitProfile,
        collectives: Collectives,
        rebuild: bool = False,
        wait_s: float = 600.0,
    ) -> ArtifactBuild:
        """Start building a document's artifact. Collective: all ranks call it with the same arguments.

        Args:
            tokens: the document's token ids, at least one.
            rebuild: build the next generation even where a fitting artifact exists.
            wait_s: seconds to wait for another process that builds the same artifact; its result is then found.

        Returns:
            The build; `exists` is set where the artifact is there and nothing is to be done.

        Raises:
            RequestError: no token, or one outside the vocabulary.
            CapacityError: no room for the artifact's exact size.
            StoreError: the store cannot be written, or another process builds the same artifact for too long.
            ConfigError: the output groups cannot be split over the ranks.
            CollectiveError: the ranks were given different documents.
        """
        # What stands if this rank breaks in a way nobody foresaw: the others are waiting and must learn of it.
        error: RedKnotError | None = CollectiveError("a rank broke while it prepared a build")
        site: _Site | None = None
        document = np.zeros(0, dtype=np.int64)
        try:
            document = checked_tokens(tokens, geometry.vocab)
            if collectives.rank == 0:
                draft, plans = self._draft(document, identity, geometry, profile, collectives.size)
                site = self._prepare(draft, plans, identity, rebuild, wait_s)
            error = None
        except RedKnotError as failure:
            error = failure
        finally:
            own = [digest_tokens(document), None if site is None else site.to_json()]
            with _abandoning(site, self._folder.files):
                replies = agree(collectives, own, error)
        with _abandoning(site, self._folder.files):
            return self._join(replies, document, identity, geometry, profile, collectives, site)

    def _join(
        self,
        replies: Sequence[object],
        document: NDArray[np.int64],
        identity: ArtifactIdentity,
        geometry: ModelGeometry,
        profile: SplitProfile,
        collectives: Collectives,
        site: _Site | None,
    ) -> ArtifactBuild:
        digests, places = zip(*replies, strict=True)
        if len(set(digests)) > 1:
            raise CollectiveError("the ranks were given different documents", expected=digests[0], found=list(digests))
        name, generation = places[0]
        draft, plans = self._draft(document, identity, geometry, profile, collectives.size)
        draft = draft.model_copy(update={"generation": generation})
        folder = None if name is None else self._folder.building / name
        locks = [] if site is None else list(site.locks)
        failure: RedKnotError | None = None
        if folder is not None and site is None:
            try:
                locks.append(_share_build(folder))
            except OSError as error:
                failure = StoreError(f"the build's folder cannot be reached: {error}", path=folder)
        agree(collectives, None, failure)
        return ArtifactBuild(
            draft=draft,
            plans=plans,
            geometry=geometry,
            tokens=document,
            collectives=collectives,
            store=self._folder,
            folder=folder,
            locks=locks,
        )

    def _draft(
        self,
        document: NDArray[np.int64],
        identity: ArtifactIdentity,
        geometry: ModelGeometry,
        profile: SplitProfile,
        tp_size: int,
    ) -> tuple[Certificate, tuple[FilePlan, ...]]:
        """The certificate but for generation, time and digests, and the files it will list."""
        tp = TpGeometry.even(geometry, tp_size)
        plans = plan_files(geometry, profile, tokens=len(document), tp_size=tp_size, form=identity.format)
        digest = digest_tokens(document)
        try:
            draft = Certificate(
                format_version=1,
                namespace=self.namespace,
                artifact_id=artifact_id_of(self.namespace, digest, identity),
                generation=1,
                created_at="1970-01-01T00:00:00Z",
                token_count=len(document),
                token_digest=digest,
                checkpoint_fingerprint=identity.checkpoint_fingerprint,
                profile_digest=identity.profile_digest,
                geometry_digest=identity.geometry_digest,
                rope_digest=identity.rope_digest,
                artifact_format=identity.format,
                head_dim=geometry.head_dim,
                rope_dim=geometry.rope_dim,
                index_dim=geometry.index_dim,
                local_width=geometry.projected // tp_size,
                layers=tuple(range(geometry.layers)),
                layers_per_group=LAYERS_PER_GROUP,
                tp_size=tp_size,
                ranks=certified_ranks(tp),
                files=tuple(CertifiedFile(path=plan.path, size=plan.bytes, digest="0" * 64) for plan in plans),
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise StoreError(f"the artifact's identity is ill-formed: {first['loc']}: {first['msg']}") from error
        return draft, plans

    def _prepare(
        self, draft: Certificate, plans: Sequence[FilePlan], identity: ArtifactIdentity, rebuild: bool, wait_s: float
    ) -> _Site:
        """Rank 0's part of `begin`: wait for a build of the same artifact, make room, create the folder."""
        if not rebuild and (found := self._fitting(draft, identity)) is not None:
            return _Site(name=None, generation=found.generation)
        lock = self._folder.build_lock(draft.artifact_id, wait_s)
        try:
            # Whoever held the lock may have built it.
            if not rebuild and (found := self._fitting(draft, identity)) is not None:
                lock.close()
                return _Site(name=None, generation=found.generation)
            present = self._folder.generations(draft.artifact_id, certified=False)
            generation = max(present, default=0) + 1
            draft = draft.model_copy(update={"generation": generation})
            needed = data_bytes(plans) + certificate_bytes(draft, [(plan.path, plan.bytes) for plan in plans])
            return self._create_site(draft, generation, needed, lock)
        except OSError as error:
            lock.close()
            raise StoreError(
                f"the artifact store cannot be written: {error.strerror or error}",
                path=error.filename or self.root,
                remedy="Check free space and permissions of the store's folder.",
            ) from error
        except RedKnotError:
            lock.close()
            raise

    def _fitting(self, draft: Certificate, identity: ArtifactIdentity) -> Certificate | None:
        found = self.find(draft.artifact_id, identity=identity, tp=draft.tp)
        return found if found is not None and found.layers == draft.layers else None

    def _create_site(self, draft: Certificate, generation: int, needed: int, lock: FileLock) -> _Site:
        folder, files = self._folder, self._folder.files
        name = folder.unique_name(draft.artifact_id, generation)
        place = folder.building / name
        with folder.mutex():
            make_room(folder, needed, self.capacity_bytes)
            ensure_folder(files, folder.building)
            files.make_folder(place)
            write_file(files, place / BUILD_LOCK, [])
            alive = _share_build(place)
            site = _Site(name=name, generation=generation, place=place, locks=(lock, alive))
            try:
                note = {"namespace": self.namespace, "bytes": needed}
                write_file(files, place / RESERVATION, [memoryview(json.dumps(note).encode())])
                files.make_folder(place / GENERATION_FOLDER)
                sync_folder(files, folder.building)
            except OSError:
                site.abandon(files)
                raise
        return site

    def _lease(self, artifact_id: str, rank: int | None, generation: int | None, timeout_s: float | None) -> Lease:
        deadline = time.monotonic() + (self._folder.lock_timeout_s if timeout_s is None else timeout_s)
        while True:
            number = self._choose(artifact_id, generation)
            lease = self._try_lease(artifact_id, rank, number)
            if lease is not None:
                return lease
            if time.monotonic() >= deadline:
                raise StoreError(
                    "an artifact stayed locked by a process that removes or checks it",
                    path=self._folder.generation(artifact_id, number) / LEASE_LOCK,
                )
            time.sleep(_POLL_S)

    def _choose(self, artifact_id: str, generation: int | None) -> int:
        present = self._folder.generations(artifact_id)
        if not present or (generation is not None and generation not in present):
            what = "" if generation is None else f" generation {generation} of"
            raise ArtifactError(
                ArtifactFault.MISSING,
                f"the artifact store has no{what} artifact {artifact_id[:64]}",
                expected=None if ARTIFACT_ID_PATTERN.fullmatch(artifact_id) else "an id of 32 hex digits",
                found=f"generations {present}" if present else None,
                path=self._folder.home,
                remedy="Build it, or check the id and the namespace.",
            )
        return present[-1] if generation is None else generation

    def _try_lease(self, artifact_id: str, rank: int | None, generation: int) -> Lease | None:
        """None where the generation is being removed or was removed meanwhile."""
        path = self._folder.generation(artifact_id, generation)
        parts = [self.namespace, artifact_id, generation_name(generation)]
        files = self._folder.files
        with contextlib.ExitStack() as undo:
            try:
                with self._folder.open_root() as root:
                    folder = Descriptor(files.open_beneath(root.fd, parts, os.O_RDONLY | os.O_DIRECTORY))
                undo.callback(folder.close)
                lock = Descriptor(_open_lock(files, folder.fd))
                undo.callback(lock.close)
                if not try_lock(lock.fd, exclusive=False) or not _is_at(path, folder.fd):
                    return None
            except FileNotFoundError as error:
                if not os.path.lexists(path):
                    return None
                raise ArtifactError(
                    ArtifactFault.FILE_MISSING, "a file of the artifact is missing", path=path / LEASE_LOCK
                ) from error
            except OSError as error:
                link = error.errno in (errno.ELOOP, errno.ENOTDIR)
                fault = ArtifactFault.FILE_NOT_REGULAR if link else ArtifactFault.FILE_UNREADABLE
                raise ArtifactError(fault, f"an artifact cannot be opened: {error.strerror}", path=path) from error
            certificate = self._folder.read_certificate(folder.fd, artifact_id, generation)
            # A store that may only be read cannot record use; it is not the one that evicts either.
            with contextlib.suppress(PermissionError, OSError):
                os.utime(lock.fd)
            undo.pop_all()
        return Lease(
            certificate=certificate,
            folder=folder,
            path=path,
            lock=FileLock(lock),
            rank=rank,
            files=files,
            verified=self._verified,
        )


class _Site:
    """Where a build takes place, on rank 0: folder name and generation, or no folder where the artifact exists."""

    def __init__(
        self, *, name: str | None, generation: int, place: Path | None = None, locks: tuple[FileLock, ...] = ()
    ) -> None:
        self.name = name
        self.generation = generation
        self.place = place
        self.locks = locks

    def to_json(self) -> list[object]:
        return [self.name, self.generation]

    def abandon(self, files: Files) -> None:
        if self.place is not None:
            with contextlib.suppress(OSError):
                files.remove_tree(self.place)
        for lock in self.locks:
            lock.close()


@contextlib.contextmanager
def _abandoning(site: _Site | None, files: Files) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if site is not None:
            site.abandon(files)
        raise


def checked_tokens(tokens: Sequence[int] | NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Token ids as int64 [n]. RequestError where there are none, or one is not an id of the vocabulary."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise RequestError("a document is not a list of token ids", found=error) from error
    if ids.ndim != 1 or not ids.size:
        raise RequestError("a document has no tokens", expected="at least one token id", found=f"shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise RequestError("a document is not a list of token ids", expected="integers", found=ids.dtype)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        raise RequestError(
            "a document has a token outside the vocabulary",
            expected=f"0 to {vocab - 1}",
            found=f"{ids[outside[0]]} at position {outside[0]}",
        )
    return np.ascontiguousarray(ids, dtype=np.int64)


def _share_build(folder: Path) -> FileLock:
    descriptor = Descriptor(os.open(folder / BUILD_LOCK, os.O_RDONLY | os.O_NOFOLLOW))
    if not try_lock(descriptor.fd, exclusive=False):
        descriptor.close()
        raise BlockingIOError(errno.EAGAIN, "the build's lock is held by a collector", str(folder))
    return FileLock(descriptor)


def _open_lock(files: Files, folder: int) -> int:
    try:
        return files.open_beneath(folder, [LEASE_LOCK], os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return files.open_beneath(folder, [LEASE_LOCK], os.O_RDONLY | os.O_NONBLOCK)


def _is_at(path: Path, fd: int) -> bool:
    try:
        there = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))
