"""The start of a build: what rank 0 prepares, and how the other ranks join it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.capacity import make_room
from trt_redknot.artifacts.certificate import Certificate, CertifiedFile, certificate_bytes, certified_ranks
from trt_redknot.artifacts.contents import LAYERS_PER_GROUP
from trt_redknot.artifacts.documents import checked_tokens
from trt_redknot.artifacts.files import Descriptor, Files, ensure_folder, sync_folder, write_file
from trt_redknot.artifacts.folder import BUILD_LOCK, GENERATION_FOLDER, RESERVATION, StoreFolder
from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry, artifact_id_of
from trt_redknot.artifacts.layout import FilePlan, data_bytes, plan_files
from trt_redknot.artifacts.locks import FileLock, try_lock
from trt_redknot.artifacts.quota import effective_capacity
from trt_redknot.collectives.agreement import agree
from trt_redknot.collectives.base import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_tokens
from trt_redknot.errors import CollectiveError, RedKnotError, StoreError

# The certificate of a fitting generation, None where there is none.
Find = Callable[[Certificate], Certificate | None]


@dataclass(frozen=True, kw_only=True)
class BuildOrder:
    """What is to be built, and for whom. `document` is int64 [n], checked."""

    namespace: str
    document: NDArray[np.int64]
    identity: ArtifactIdentity
    geometry: ModelGeometry
    profile: SplitProfile
    tp_size: int

    @cached_property
    def plans(self) -> tuple[FilePlan, ...]:
        return plan_files(
            self.geometry,
            self.profile,
            tokens=len(self.document),
            tp_size=self.tp_size,
            form=self.identity.format,
        )

    def draft(self, generation: int = 1) -> Certificate:
        """The certificate but for its time and the files' digests. StoreError where the identity is ill-formed."""
        identity, geometry, digest = self.identity, self.geometry, digest_tokens(self.document)
        ranks = certified_ranks(TpGeometry.even(geometry, self.tp_size))
        try:
            return Certificate(
                format_version=1,
                namespace=self.namespace,
                artifact_id=artifact_id_of(self.namespace, digest, identity),
                generation=generation,
                created_at="1970-01-01T00:00:00Z",
                token_count=len(self.document),
                token_digest=digest,
                checkpoint_fingerprint=identity.checkpoint_fingerprint,
                profile_digest=identity.profile_digest,
                geometry_digest=identity.geometry_digest,
                rope_digest=identity.rope_digest,
                artifact_format=identity.format,
                head_dim=geometry.head_dim,
                rope_dim=geometry.rope_dim,
                index_dim=geometry.index_dim,
                local_width=geometry.projected // self.tp_size,
                layers=tuple(range(geometry.layers)),
                layers_per_group=LAYERS_PER_GROUP,
                tp_size=self.tp_size,
                ranks=ranks,
                files=tuple(CertifiedFile(path=plan.path, size=plan.bytes, digest="0" * 64) for plan in self.plans),
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise StoreError(f"the artifact's identity is ill-formed: {first['loc']}: {first['msg']}") from error


class Site:
    """Where a build takes place, on rank 0: folder name and generation, or no folder where the artifact exists."""

    def __init__(
        self, *, name: str | None, generation: int, place: Path | None = None, locks: tuple[FileLock, ...] = ()
    ) -> None:
        self.name = name
        self.generation = generation
        self.place = place
        self.locks = locks

    def abandon(self, files: Files) -> None:
        if self.place is not None:
            with contextlib.suppress(OSError):
                files.remove_tree(self.place)
        for lock in self.locks:
            lock.close()


def begin_build(
    store: StoreFolder,
    capacity: int | None,
    find: Find,
    *,
    tokens: Sequence[int] | NDArray[np.int64],
    identity: ArtifactIdentity,
    geometry: ModelGeometry,
    profile: SplitProfile,
    collectives: Collectives,
    wait_s: float,
) -> ArtifactBuild:
    """See :meth:`ArtifactStore.begin`. Collective: two exchanges, entered by every rank whatever happens to it."""
    # What stands if this rank breaks in a way nobody foresaw: the others are waiting and must learn of it.
    error: RedKnotError | None = CollectiveError("a rank broke while it prepared a build")
    site: Site | None = None
    digest, order = "", None
    try:
        document = checked_tokens(tokens, geometry.vocab)
        digest = digest_tokens(document)
        order = BuildOrder(
            namespace=store.namespace,
            document=document,
            identity=identity,
            geometry=geometry,
            profile=profile,
            tp_size=collectives.size,
        )
        if collectives.rank == 0:
            site = _prepare(store, capacity, find, order, wait_s)
        error = None
    except RedKnotError as failure:
        error = failure
    finally:
        own = [digest, None if site is None else [site.name, site.generation]]
        with _abandoning(site, store.files):
            replies = agree(collectives, own, error)
    assert order is not None
    with _abandoning(site, store.files):
        return _join(store, replies, order, collectives, site)


def _prepare(store: StoreFolder, capacity: int | None, find: Find, order: BuildOrder, wait_s: float) -> Site:
    """Rank 0's part: wait for a build of the same artifact, make room, create the folder."""
    draft = order.draft()
    if (found := find(draft)) is not None:
        return Site(name=None, generation=found.generation)
    lock = store.build_lock(draft.artifact_id, wait_s)
    try:
        # Whoever held the lock may have built it.
        if (found := find(draft)) is not None:
            lock.close()
            return Site(name=None, generation=found.generation)
        store.refuse_links(draft.artifact_id)
        generation = store.next_generation(draft.artifact_id)
        sizes = [(plan.path, plan.bytes) for plan in order.plans]
        needed = data_bytes(order.plans) + certificate_bytes(order.draft(generation), sizes)
        return _create_site(store, capacity, draft.artifact_id, generation, needed, lock, wait_s)
    except OSError as error:
        lock.close()
        raise StoreError(
            f"the artifact store cannot be written: {error.strerror or error}",
            path=error.filename or store.root,
            remedy="Check free space and permissions of the store's folder.",
        ) from error
    except RedKnotError:
        lock.close()
        raise


def _create_site(
    store: StoreFolder,
    capacity: int | None,
    artifact_id: str,
    generation: int,
    needed: int,
    lock: FileLock,
    wait_s: float,
) -> Site:
    files = store.files
    name = store.unique_name(artifact_id, generation)
    place = store.building / name
    with store.mutex(wait_s):
        for evicted in make_room(store, needed, effective_capacity(store, capacity)):
            store.events.evicted(evicted.artifact_id, evicted.generation, evicted.bytes)
        ensure_folder(files, store.building)
        files.make_folder(place)
        write_file(files, place / BUILD_LOCK, [])
        alive = _share_build(place)
        site = Site(name=name, generation=generation, place=place, locks=(lock, alive))
        try:
            note = {"namespace": store.namespace, "bytes": needed}
            write_file(files, place / RESERVATION, [memoryview(json.dumps(note).encode())])
            files.make_folder(place / GENERATION_FOLDER)
            sync_folder(files, store.building)
        except OSError:
            site.abandon(files)
            raise
    return site


def _join(
    store: StoreFolder, replies: Sequence[object], order: BuildOrder, collectives: Collectives, site: Site | None
) -> ArtifactBuild:
    digests, places = zip(*replies, strict=True)
    if len(set(digests)) > 1:
        raise CollectiveError("the ranks were given different documents", expected=digests[0], found=list(digests))
    name, generation = places[0]
    folder = None if name is None else store.building / name
    locks = [] if site is None else list(site.locks)
    failure: RedKnotError | None = None
    if folder is not None and site is None:
        try:
            locks.append(_share_build(folder))
        except OSError as error:
            failure = StoreError(f"the build's folder cannot be reached: {error}", path=folder)
    agree(collectives, None, failure)
    return ArtifactBuild(
        draft=order.draft(generation),
        plans=order.plans,
        geometry=order.geometry,
        tokens=order.document,
        collectives=collectives,
        store=store,
        folder=folder,
        locks=locks,
    )


@contextlib.contextmanager
def _abandoning(site: Site | None, files: Files) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if site is not None:
            site.abandon(files)
        raise


def _share_build(folder: Path) -> FileLock:
    descriptor = Descriptor(os.open(folder / BUILD_LOCK, os.O_RDONLY | os.O_NOFOLLOW))
    if not try_lock(descriptor.fd, exclusive=False):
        descriptor.close()
        raise BlockingIOError(errno.EAGAIN, "the build's lock is held by a collector", str(folder))
    return FileLock(descriptor)
