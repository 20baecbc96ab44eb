"""Writing one generation of an artifact, by all ranks together: nothing is visible before every rank has succeeded."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.certificate import Certificate, CertifiedFile
from trt_redknot.artifacts.contents import PartSpec
from trt_redknot.artifacts.copies import HostCopies, HostCopy
from trt_redknot.artifacts.files import Descriptor, ensure_folder, sync_folder, write_file
from trt_redknot.artifacts.folder import GENERATION_FOLDER, StoreFolder
from trt_redknot.artifacts.formats import TensorCodec
from trt_redknot.artifacts.layout import (
    TOKENS,
    TOKENS_FILE,
    FilePlan,
    file_of,
    tensor_name,
)
from trt_redknot.artifacts.locks import FileLock
from trt_redknot.artifacts.names import CERTIFICATE, LEASE_LOCK
from trt_redknot.artifacts.tensorfile import file_chunks
from trt_redknot.artifacts.usage import record_use
from trt_redknot.collectives.agreement import agree
from trt_redknot.collectives.base import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.errors import RedKnotError, StoreError


class ArtifactBuild:
    """Made by :meth:`ArtifactStore.begin`; a context manager. Leaving it without `publish` removes what was written.

    `add` never raises for a full disk or a failed write: the first failure is kept and `publish`, which every rank
    calls, raises it on all ranks. A caller whose own work fails on one rank tells it with `fail` and goes on to
    `publish`. Leaving on an exception is local, so that the exception can end the job.

    Attributes:
        artifact_id: the id, known before anything is written.
        exists: the artifact was there already; nothing is to be added, `publish` returns the id at once.
        specs: the parts this rank can add: all common ones (each file's parts from one rank) and its own.
    """

    def __init__(
        self,
        *,
        draft: Certificate,
        plans: Sequence[FilePlan],
        geometry: ModelGeometry,
        tokens: NDArray[np.int64],
        collectives: Collectives,
        store: StoreFolder,
        folder: Path | None,
        locks: Sequence[FileLock],
    ) -> None:
        self.artifact_id = draft.artifact_id
        self.generation = draft.generation
        self.exists = folder is None
        self._draft = draft
        self._geometry = geometry
        self._tokens = tokens
        self._collectives = collectives
        self._store = store
        self._folder = folder
        self._locks = list(locks)
        self._plans = {plan.path: plan for plan in plans if plan.rank in (None, collectives.rank)}
        self._expected = {plan.path for plan in plans}
        self._copies = HostCopies()
        self._buffers: dict[str, dict[str, HostCopy]] = {}
        self._written: dict[str, CertifiedFile] = {}
        self._failure: RedKnotError | None = None
        self._over = False
        self._started = time.perf_counter()

    @property
    def specs(self) -> tuple[PartSpec, ...]:
        return tuple(spec for plan in self._plans.values() for spec in plan.specs)

    @property
    def bytes(self) -> int:
        """Bytes of the tensor files of this rank and the common ones."""
        return sum(plan.bytes for plan in self._plans.values())

    def add(self, spec: PartSpec, tensor: torch.Tensor) -> None:
        """Take one part, [shape of spec], any float dtype, any device; it is encoded at once, the caller keeps its own.

        Parts leave a GPU while the next ones are computed. A layer group's file is written when its last part has come,
        so host memory holds at most the open groups.

        Raises:
            ValueError: a part that is not in this rank's plan, of another shape, or added twice.
        """
        path = file_of(spec, self._collectives.rank)
        plan = self._plans.get(path)
        if self.exists or self._over or plan is None or spec not in plan.specs:
            raise ValueError(f"{tensor_name(spec)} {spec.shape} is not expected here")
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(f"{tensor_name(spec)}: expected {spec.shape}, found {tuple(tensor.shape)}")
        buffer = self._buffers.setdefault(path, {})
        if path in self._written or tensor_name(spec) in buffer:
            raise ValueError(f"{tensor_name(spec)} was added before")
        if self._failure is not None:
            return
        codec = TensorCodec.of(spec, self._draft.artifact_format, self._geometry)
        buffer[tensor_name(spec)] = self._copies.begin(codec.encode(tensor))
        if len(buffer) == len(plan.entries):
            self._write(plan, {name: copy.wait() for name, copy in self._buffers.pop(path).items()})

    def fail(self, error: RedKnotError) -> None:
        """This rank cannot go on: `publish` will raise `error` on all ranks. Only the first failure counts."""
        self._failure = self._failure or error
        self._buffers.clear()

    def publish(self) -> str:
        """Make the artifact visible. Collective: every rank calls it, whatever happened to it before.

        Returns:
            The artifact's id.

        Raises:
            StoreError: a rank failed to write, a part was not added, or two ranks wrote the same file; on all ranks,
                with nothing visible.
        """
        if self.exists:
            return self.artifact_id
        try:
            if self._collectives.rank == 0:
                self._write_tokens()
            if self._failure is None and self._buffers:
                self.fail(self._incomplete(sorted(self._buffers)))
            own = [(file.path, file.size, file.digest) for file in self._written.values()]
            lists = agree(self._collectives, own, self._failure)
            files = self._merged(lists)
            error = self._make_visible(files) if self._collectives.rank == 0 else None
            agree(self._collectives, None, error)
        finally:
            self.close()
        if self._collectives.rank == 0:
            size, seconds = sum(file.size for file in files), time.perf_counter() - self._started
            self._store.events.built(self.artifact_id, self.generation, bytes=size, seconds=seconds)
        return self.artifact_id

    def close(self) -> None:
        """Drop what is not published. Local: other ranks are neither told nor awaited."""
        if self._over:
            return
        self._over = True
        self._buffers.clear()
        if self._folder is not None and self._collectives.rank == 0:
            # What cannot be removed now (a rank still writes, the disk fails) is an orphan once the locks are free.
            with contextlib.suppress(OSError):
                self._store.files.remove_tree(self._folder)
        for lock in self._locks:
            lock.close()

    def __enter__(self) -> ArtifactBuild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _generation_folder(self) -> Path:
        assert self._folder is not None
        return self._folder / GENERATION_FOLDER

    def _write_tokens(self) -> None:
        if self._failure is None:
            self._write(self._plans[TOKENS_FILE], {TOKENS: torch.from_numpy(self._tokens)})

    def _write(self, plan: FilePlan, tensors: Mapping[str, torch.Tensor]) -> None:
        path = self._generation_folder / plan.path
        try:
            ensure_folder(self._store.files, path.parent)
            size, digest = write_file(self._store.files, path, file_chunks(plan.entries, tensors))
        except FileExistsError:
            self.fail(_written_twice(plan.path))
            return
        except OSError as error:
            self.fail(_cannot_write(error, path))
            return
        self._written[plan.path] = CertifiedFile(path=plan.path, size=size, digest=digest)
        if plan.bytes != size:
            self.fail(StoreError("a file has another size than planned", expected=plan.bytes, found=size, path=path))

    def _merged(self, lists: Sequence[object]) -> tuple[CertifiedFile, ...]:
        merged: dict[str, CertifiedFile] = {}
        for files in lists:
            assert isinstance(files, list)
            for path, size, digest in files:
                if path in merged:
                    raise _written_twice(path)
                merged[path] = CertifiedFile(path=path, size=size, digest=digest)
        missing = sorted(self._expected - set(merged))
        if missing:
            raise self._incomplete(missing)
        return tuple(merged[path] for path in sorted(merged))

    def _incomplete(self, paths: Sequence[str]) -> StoreError:
        missing = [
            entry.name
            for path in paths
            if path in self._plans
            for entry in self._plans[path].entries
            if entry.name not in self._buffers.get(path, {})
        ]
        return StoreError(
            f"artifact {self.artifact_id} is incomplete",
            expected="every part of every file before publish",
            found=f"unfinished {list(paths)}, missing {missing[:8]}{'...' if len(missing) > 8 else ''}",
        )

    def _make_visible(self, files: tuple[CertifiedFile, ...]) -> RedKnotError | None:
        source = self._generation_folder
        try:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            certificate = self._draft.model_copy(update={"files": files, "created_at": now})
            disk = self._store.files
            write_file(disk, source / LEASE_LOCK, [])
            with Descriptor(os.open(source / LEASE_LOCK, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                record_use(self._store, lock.fd)
            for folder in sorted({os.path.dirname(file.path) for file in files}):
                sync_folder(disk, source / folder)
            write_file(disk, source / CERTIFICATE, [memoryview(certificate.encode())])
            sync_folder(disk, source)
            with self._store.mutex():
                self._store.refuse_links(self.artifact_id)
                target = self._store.generation(self.artifact_id, self.generation)
                ensure_folder(disk, target.parent)
                disk.rename(source, target)
                self._settle(target)
        except StoreError as error:
            return error
        except OSError as error:
            return _cannot_write(error, source)
        return None

    def _settle(self, target: Path) -> None:
        try:
            for folder in (target.parent, self._store.home, self._store.root):
                sync_folder(self._store.files, folder)
        except OSError:
            # The ranks are about to be told that it failed, so it must not stay visible.
            self._store.discard(target)
            raise


def _written_twice(path: str) -> StoreError:
    return StoreError(
        "two ranks wrote the same file of an artifact", path=path, remedy="Let one rank add all common parts of a file."
    )


def _cannot_write(error: OSError, path: Path) -> StoreError:
    return StoreError(
        f"the artifact store cannot be written: {error.strerror or error}",
        path=path,
        remedy="Check free space and permissions of the store's folder.",
    )
