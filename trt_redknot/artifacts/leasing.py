"""Taking a lease: the newest published generation, locked so that nobody removes it, its certificate read."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from trt_redknot.artifacts.checks import VerifiedFiles
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Descriptor, Files
from trt_redknot.artifacts.folder import ARTIFACT_ID_PATTERN, StoreFolder, generation_name
from trt_redknot.artifacts.lease import Lease
from trt_redknot.artifacts.locks import FileLock, holders_at, is_at, try_lock
from trt_redknot.artifacts.names import LEASE_LOCK
from trt_redknot.artifacts.usage import record_use
from trt_redknot.errors import BusyError

_POLL_S = 0.01


def take_lease(
    store: StoreFolder,
    verified: VerifiedFiles,
    artifact_id: str,
    *,
    rank: int | None,
    generation: int | None,
    timeout_s: float | None,
) -> Lease:
    """See :meth:`ArtifactStore.open`; nothing but the certificate is checked."""
    store.hosts.check(claim=False)
    deadline = time.monotonic() + (store.lock_timeout_s if timeout_s is None else timeout_s)
    while True:
        number = _choose(store, artifact_id, generation)
        lease = _try(store, verified, artifact_id, rank, number)
        if lease is not None:
            return lease
        if time.monotonic() >= deadline:
            raise BusyError(
                "an artifact stayed locked by a process that removes or checks it",
                found=f"holder {holders_at(store.generation(artifact_id, number) / LEASE_LOCK)}",
                path=store.generation(artifact_id, number) / LEASE_LOCK,
                remedy="Wait for that process, or end it: the lock ends with it.",
            )
        time.sleep(_POLL_S)


def present_generations(store: StoreFolder, artifact_id: str) -> list[int]:
    """Generations that have a certificate, ascending; ArtifactError where the artifact's folder cannot be read."""
    try:
        return store.generations(artifact_id)
    except OSError as error:
        raise ArtifactError(
            ArtifactFault.FILE_UNREADABLE,
            f"an artifact's folder cannot be read: {error.strerror or error}",
            path=store.artifact(artifact_id),
            remedy="Check the permissions of the store's folder, and that its disk works.",
        ) from error


def _choose(store: StoreFolder, artifact_id: str, generation: int | None) -> int:
    present = present_generations(store, artifact_id)
    if not present or (generation is not None and generation not in present):
        what = "" if generation is None else f" generation {generation} of"
        raise ArtifactError(
            ArtifactFault.MISSING,
            f"the artifact store has no{what} artifact {artifact_id[:64]}",
            expected=None if ARTIFACT_ID_PATTERN.fullmatch(artifact_id) else "an id of 32 hex digits",
            found=f"generations {present}" if present else None,
            path=store.home,
            remedy="Build it, or check the id and the namespace.",
        )
    return present[-1] if generation is None else generation


def _try(
    store: StoreFolder, verified: VerifiedFiles, artifact_id: str, rank: int | None, generation: int
) -> Lease | None:
    """None where the generation is being removed or was removed meanwhile."""
    path = store.generation(artifact_id, generation)
    parts = [store.namespace, artifact_id, generation_name(generation)]
    files = store.files
    with contextlib.ExitStack() as undo:
        try:
            with store.open_root() as root:
                folder = Descriptor(files.open_beneath(root.fd, parts, os.O_RDONLY | os.O_DIRECTORY))
            undo.callback(folder.close)
            lock = Descriptor(_open_lock(files, folder.fd))
            undo.callback(lock.close)
            if not try_lock(lock.fd, exclusive=False) or not is_at(path, folder.fd):
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
        certificate = store.read_certificate(folder.fd, artifact_id, generation)
        record_use(store, lock.fd)
        undo.pop_all()
    return Lease(
        certificate=certificate,
        folder=folder,
        path=path,
        lock=FileLock(lock),
        rank=rank,
        files=files,
        verified=verified,
        events=store.events,
    )


def _open_lock(files: Files, folder: int) -> int:
    try:
        return files.open_beneath(folder, [LEASE_LOCK], os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return files.open_beneath(folder, [LEASE_LOCK], os.O_RDONLY | os.O_NONBLOCK)
