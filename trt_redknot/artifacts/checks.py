"""One file of a generation against its certificate: there, regular, of its size, of its content."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from trt_redknot.artifacts.certificate import CertifiedFile
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Descriptor, Files, digest_open_file


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
) -> int:
    """Compare an open file with its certified digest, unless that was done before and the file is unchanged since.

    Returns:
        Bytes that were read for it.
    """
    status = os.fstat(fd)
    if verified.has(status, certified.digest):
        return 0
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
    return size


def unreadable(error: OSError, label: str) -> ArtifactError:
    return ArtifactError(
        ArtifactFault.FILE_UNREADABLE, f"a file of the artifact cannot be read: {error.strerror or error}", path=label
    )
