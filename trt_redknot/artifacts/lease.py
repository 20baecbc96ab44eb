"""A lease: one generation of one artifact, held against eviction, its tensors read through a memory map."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.certificate import Certificate, CertifiedFile
from trt_redknot.artifacts.checks import VerifiedFiles, check_digest, nothing_between, open_certified
from trt_redknot.artifacts.contents import Part, PartSpec
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Descriptor, Files
from trt_redknot.artifacts.formats import TensorCodec
from trt_redknot.artifacts.layout import TOKENS, TOKENS_FILE, file_of, tensor_name
from trt_redknot.artifacts.locks import FileLock
from trt_redknot.artifacts.tensorfile import TensorFile
from trt_redknot.digests import digest_tokens
from trt_redknot.observability.events import StoreEvents, Tier


class Lease:
    """Made by :meth:`ArtifactStore.open`; a context manager. Tensors that were read stay readable after `close`.

    No tensor is served from a file whose size and digest were not compared with the certificate: `verify` does it for
    all files this rank needs, and any other access does it for the file it needs.

    Args:
        rank: whose Local contributions `tensor` and `rows` read; None where only common parts are read.
    """

    def __init__(
        self,
        *,
        certificate: Certificate,
        folder: Descriptor,
        path: Path,
        lock: FileLock,
        rank: int | None,
        files: Files,
        verified: VerifiedFiles,
        events: StoreEvents,
    ) -> None:
        self.certificate = certificate
        self.path = path
        self.rank = rank
        self._folder = folder
        self._lock = lock
        self._files = files
        self._verified = verified
        self._events = events
        self._open: dict[str, TensorFile] = {}
        # Held where the folder is looked into: its descriptor must not be closed, and its number reused, meanwhile.
        self._guard = threading.Lock()
        self._closed = False

    @property
    def artifact_id(self) -> str:
        return self.certificate.artifact_id

    @property
    def generation(self) -> int:
        return self.certificate.generation

    @cached_property
    def content_digest(self) -> str:
        """Of the certificate but for its generation and time: equal where every file is."""
        return self.certificate.agreement_digest

    def verify(self, between: Callable[[], None] = nothing_between) -> None:
        """Check the files this rank needs (all files where it has no rank) and map them.

        Args:
            between: called between files and between chunks of a file; what it raises (a deadline) passes through.

        Raises:
            ArtifactError: the first file that is missing, not a regular file, of wrong size or content, or unreadable.
        """
        for file in self.certificate.files_of(self.rank):
            between()
            if file.path == TOKENS_FILE:
                self.tokens(between)
            else:
                self._file(file.path, between)

    def check_sizes(self) -> None:
        """Check that the certified files are there with their size, without reading them; else ArtifactError."""
        for file in self.certificate.files_of(self.rank):
            self._open_certified(file, str(self.path / file.path)).close()

    def tokens(self, between: Callable[[], None] = nothing_between) -> NDArray[np.int64]:
        """The document's token ids, int64 [token_count], checked against the certificate's token digest."""
        certified = self._certified(TOKENS_FILE)
        label = str(self.path / TOKENS_FILE)
        with self._open_certified(certified, label) as target:
            mismatch = None
            try:
                self._check_digest(target.fd, certified, label, between)
            except ArtifactError as error:
                if error.fault is not ArtifactFault.FILE_DIGEST:
                    raise
                # A well-formed file with other token ids is an edited document, which says more than a wrong checksum.
                mismatch = error
            file = TensorFile(target.fd, certified.size, label=label, files=self._files)
        ids = self._document(file.tensor(TOKENS), label)
        if mismatch is not None:
            raise mismatch
        return ids

    def _document(self, tokens: torch.Tensor, label: str) -> NDArray[np.int64]:
        if tokens.dtype is not torch.int64 or tuple(tokens.shape) != (self.certificate.token_count,):
            raise ArtifactError(
                ArtifactFault.FILE_HEADER,
                "the token file does not hold the document",
                expected=f"int64 [{self.certificate.token_count}]",
                found=f"{tokens.dtype} {list(tokens.shape)}",
                path=label,
            )
        ids: NDArray[np.int64] = tokens.numpy().copy()
        found = digest_tokens(ids)
        if found != self.certificate.token_digest:
            raise ArtifactError(
                ArtifactFault.TOKENS,
                "the token ids are not those of the certificate",
                expected=self.certificate.token_digest,
                found=found,
                path=label,
            )
        return ids

    def raw(self, part: Part, layer: int | None) -> torch.Tensor:
        """The tensor as stored (packed rows uint8 in format fp8): a view of the private memory map."""
        spec = PartSpec(part=part, layer=layer, shape=())
        return self._file(self._path_of(part, layer), nothing_between).tensor(tensor_name(spec))

    def count(self, tier: Tier, bytes: int) -> None:
        """Tell the store's events of bytes that were taken from an engine's tier instead of the memory map."""
        self._events.moved(tier, bytes)

    def check(self, part: Part, layer: int | None, between: Callable[[], None] = nothing_between) -> None:
        """Verify the file that holds a tensor now, as `verify` does for all; later reads of it find it checked."""
        self._file(self._path_of(part, layer), between)

    def shape(self, part: Part, layer: int | None) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        stored = self.raw(part, layer)
        codec = self.codec(part)
        return (*stored.shape[:-1], codec.width) if codec.packed else tuple(stored.shape)

    def tensor(self, part: Part, layer: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor, decoded to `dtype`; left out: the dtype it is stored in, bf16 for packed rows.

        May be a view of the private memory map. Shapes are those of :func:`artifact_parts`.
        """
        stored = self.raw(part, layer)
        self._events.moved(Tier.HOST, stored.nbytes)
        return self._decode(part, stored, dtype)

    def rows(
        self, part: Part, layer: int | None, index: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Rows `index` (int64 [k], any order, repeats allowed): [k, ...]. Reads only the pages they lie on.

        Raises:
            IndexError: a row outside the tensor.
        """
        stored = self.raw(part, layer)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < stored.shape[0]:
            raise IndexError(f"rows {int(index.min())}..{int(index.max())} of {part} with {stored.shape[0]} rows")
        chosen = stored.index_select(0, index.cpu())
        self._events.moved(Tier.HOST, chosen.nbytes)
        return self._decode(part, chosen, dtype)

    def close(self) -> None:
        """Let the generation go. Safe while other threads read: they get what they have begun, or ValueError."""
        with self._guard:
            self._closed = True
            self._folder.close()
        self._open.clear()
        self._lock.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path_of(self, part: Part, layer: int | None) -> str:
        spec = PartSpec(part=part, layer=layer, shape=())
        if spec.by_rank and self.rank is None:
            raise ValueError("a lease without a rank has no Local contributions")
        return file_of(spec, 0 if self.rank is None else self.rank)

    def codec(self, part: Part) -> TensorCodec:
        """How the tensors of a part are stored."""
        certificate = self.certificate
        widths = {Part.INDEX_KEYS: certificate.index_dim, Part.LOCAL: certificate.local_width}
        return TensorCodec(
            part=part,
            format=certificate.artifact_format,
            width=widths.get(part, certificate.head_dim),
            rope_dim=certificate.rope_dim,
        )

    def _decode(self, part: Part, stored: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        codec = self.codec(part)
        if dtype is None:
            dtype = self.certificate.artifact_format.dtype if codec.packed else codec.stored_dtype
        return codec.decode(stored, dtype)

    def _file(self, path: str, between: Callable[[], None]) -> TensorFile:
        found = self._open.get(path)
        if found is None:
            # Two threads may both check a file; the second finds it remembered.
            found = self._open[path] = self._checked(self._certified(path), between)
        return found

    def _open_certified(self, certified: CertifiedFile, label: str) -> Descriptor:
        with self._guard:
            if self._closed:
                raise ValueError(f"the lease of artifact {self.artifact_id} is closed")
            return open_certified(self._files, self._folder.fd, certified, label=label)

    def _check_digest(self, fd: int, certified: CertifiedFile, label: str, between: Callable[[], None]) -> None:
        read = check_digest(self._files, fd, certified, label=label, verified=self._verified, between=between)
        self._events.moved(Tier.DISK, read)

    def _certified(self, path: str) -> CertifiedFile:
        certified = self.certificate.file(path)
        if certified is None:
            raise ArtifactError(ArtifactFault.FILE_MISSING, "the certificate lists no such file", path=self.path / path)
        return certified

    def _checked(self, certified: CertifiedFile, between: Callable[[], None]) -> TensorFile:
        label = str(self.path / certified.path)
        with self._open_certified(certified, label) as target:
            self._check_digest(target.fd, certified, label, between)
            return TensorFile(target.fd, certified.size, label=label, files=self._files)
