"""A lease: one generation of one artifact, held against eviction, its tensors read through a memory map."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.certificate import Certificate, CertifiedFile
from trt_redknot.artifacts.contents import Part, PartSpec
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Descriptor, Files, digest_open_file
from trt_redknot.artifacts.formats import TensorCodec
from trt_redknot.artifacts.layout import TOKENS, TOKENS_FILE, file_of, tensor_name
from trt_redknot.artifacts.locks import FileLock
from trt_redknot.artifacts.tensorfile import TensorFile
from trt_redknot.digests import digest_tokens


class VerifiedFiles:
    """Which files were found to match their digest, by what the file system says of them.

    A file counts as unchanged while device, inode, modification time, change time and size are the same; anything else
    is hashed again. The memory lives with the store object, so a new process verifies what it opens once.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str] = {}

    @staticmethod
    def _key(status: os.stat_result) -> tuple[int, ...]:
        return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)

    def has(self, status: os.stat_result, digest: str) -> bool:
        return self._known.get(self._key(status)) == digest

    def remember(self, status: os.stat_result, digest: str) -> None:
        self._known[self._key(status)] = digest


def nothing_between() -> None:
    """Default of `between`: no deadline."""


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
    ) -> None:
        self.certificate = certificate
        self.path = path
        self.rank = rank
        self._folder = folder
        self._lock = lock
        self._files = files
        self._verified = verified
        self._open: dict[str, TensorFile] = {}

    @property
    def artifact_id(self) -> str:
        return self.certificate.artifact_id

    @property
    def generation(self) -> int:
        return self.certificate.generation

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
            open_certified(self._files, self._folder.fd, file, label=str(self.path / file.path)).close()

    def tokens(self, between: Callable[[], None] = nothing_between) -> NDArray[np.int64]:
        """The document's token ids, int64 [token_count], checked against the certificate's token digest."""
        certified = self._certified(TOKENS_FILE)
        label = str(self.path / TOKENS_FILE)
        with open_certified(self._files, self._folder.fd, certified, label=label) as target:
            mismatch = None
            try:
                check_digest(self._files, target.fd, certified, label=label, verified=self._verified, between=between)
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
        if spec.by_rank and self.rank is None:
            raise ValueError("a lease without a rank has no Local contributions")
        name = file_of(spec, 0 if self.rank is None else self.rank)
        return self._file(name, nothing_between).tensor(tensor_name(spec))

    def tensor(self, part: Part, layer: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor, decoded to `dtype`; left out: the dtype it is stored in, bf16 for packed rows.

        May be a view of the private memory map. Shapes are those of :func:`artifact_parts`.
        """
        return self._decode(part, self.raw(part, layer), dtype)

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
        return self._decode(part, stored.index_select(0, index.cpu()), dtype)

    def close(self) -> None:
        self._open.clear()
        self._folder.close()
        self._lock.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(self, part: Part, stored: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        certificate = self.certificate
        widths = {Part.INDEX_KEYS: certificate.index_dim, Part.LOCAL: certificate.local_width}
        codec = TensorCodec(
            part=part,
            format=certificate.artifact_format,
            width=widths.get(part, certificate.head_dim),
            rope_dim=certificate.rope_dim,
        )
        if dtype is None:
            dtype = certificate.artifact_format.dtype if codec.packed else codec.stored_dtype
        return codec.decode(stored, dtype)

    def _file(self, path: str, between: Callable[[], None]) -> TensorFile:
        if path not in self._open:
            self._open[path] = self._checked(self._certified(path), between)
        return self._open[path]

    def _certified(self, path: str) -> CertifiedFile:
        certified = self.certificate.file(path)
        if certified is None:
            raise ArtifactError(ArtifactFault.FILE_MISSING, "the certificate lists no such file", path=self.path / path)
        return certified

    def _checked(self, certified: CertifiedFile, between: Callable[[], None]) -> TensorFile:
        label = str(self.path / certified.path)
        with open_certified(self._files, self._folder.fd, certified, label=label) as target:
            check_digest(self._files, target.fd, certified, label=label, verified=self._verified, between=between)
            return TensorFile(target.fd, certified.size, label=label, files=self._files)


def open_certified(files: Files, folder: int, certified: CertifiedFile, *, label: str) -> Descriptor:
    """Open a file of a generation; ArtifactError where it is missing, a link, not a regular file or of another size."""
    try:
        target = Descriptor(files.open_beneath(folder, certified.path.split("/"), os.O_RDONLY | os.O_NONBLOCK))
        status = os.fstat(target.fd)
    except FileNotFoundError as error:
        raise ArtifactError(ArtifactFault.FILE_MISSING, "a file of the artifact is missing", path=label) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            raise ArtifactError(
                ArtifactFault.FILE_NOT_REGULAR, "a file of the artifact is a link or a folder", path=label
            ) from error
        raise unreadable(error, label) from error
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(ArtifactFault.FILE_NOT_REGULAR, "a file of the artifact is not a regular file", path=label)
    if status.st_size != certified.size:
        raise ArtifactError(
            ArtifactFault.FILE_SIZE,
            "a file of the artifact has another size",
            expected=f"{certified.size} bytes",
            found=f"{status.st_size} bytes",
            path=label,
        )
    return target


def check_digest(
    files: Files,
    fd: int,
    certified: CertifiedFile,
    *,
    label: str,
    verified: VerifiedFiles,
    between: Callable[[], None] = nothing_between,
) -> None:
    """Compare an open file with its certified digest, unless that was done before and the file is unchanged since."""
    status = os.fstat(fd)
    if verified.has(status, certified.digest):
        return
    try:
        size, digest = digest_open_file(files, fd, between)
    except OSError as error:
        raise unreadable(error, label) from error
    if (size, digest) != (certified.size, certified.digest):
        raise ArtifactError(
            ArtifactFault.FILE_DIGEST,
            "a file of the artifact has other content than certified",
            expected=certified.digest,
            found=digest,
            path=label,
        )
    verified.remember(status, digest)


def unreadable(error: OSError, label: str) -> ArtifactError:
    return ArtifactError(
        ArtifactFault.FILE_UNREADABLE, f"a file of the artifact cannot be read: {error.strerror or error}", path=label
    )
