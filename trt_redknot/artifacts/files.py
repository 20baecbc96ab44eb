"""The store's one door to the file system, so that tests can make every single call of it fail or kill the process."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blake3 import blake3

CHUNK_BYTES = 4 << 20


class Files:
    """What the store does to a disk. Every method raises OSError as the operating system does."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o755)

    def create(self, path: Path) -> int:
        """A new file, open for writing; never an existing one, never through a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it; links are removed, never followed. Others may be removing it too."""
        while os.path.lexists(path):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def open_beneath(self, folder: int, parts: Iterable[str], flags: int) -> int:
        """Open a path below an open folder, refusing a link in any of its components."""
        *folders, name = parts
        with contextlib.ExitStack() as opened:
            for part in folders:
                folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                opened.callback(os.close, folder)
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)

    def touch(self, fd: int, at_ns: int) -> None:
        """Set the times of an open file, in nanoseconds since the epoch."""
        os.utime(fd, ns=(at_ns, at_ns))

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)


class Descriptor:
    """An open file or folder that is closed at the latest when nobody refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_file(files: Files, path: Path, chunks: Iterable[memoryview]) -> tuple[int, str]:
    """Write and sync a new file; its size and hex BLAKE3."""
    hasher, size = blake3(max_threads=1), 0
    with Descriptor(files.create(path)) as target:
        for chunk in chunks:
            for start in range(0, len(chunk), CHUNK_BYTES):
                piece = chunk[start : start + CHUNK_BYTES]
                hasher.update(piece)
                size += len(piece)
                while len(piece):
                    piece = piece[files.write(target.fd, piece) :]
        files.sync(target.fd)
    return size, hasher.hexdigest()


def sync_folder(files: Files, path: Path) -> None:
    with Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as folder:
        files.sync(folder.fd)


def ensure_folder(files: Files, path: Path) -> None:
    """Create `path` and its parents where they are missing. Raises NotADirectoryError where something else is there."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_folder(folder)


def read_exactly(files: Files, fd: int, size: int, offset: int = 0) -> bytes:
    """`size` bytes from `offset`. Raises EOFError where the file ends before."""
    buffer = bytearray(size)
    view, done = memoryview(buffer), 0
    while done < size:
        count = files.read_into(fd, view[done:], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at {offset + done}, {offset + size} bytes were expected")
        done += count
    return bytes(buffer)


def digest_open_file(files: Files, fd: int, between: Callable[[], None]) -> tuple[int, str]:
    """Size and hex BLAKE3 of an open file, read in chunks (a read error is an OSError, never a fault of the process).

    Args:
        between: called before every chunk; what it raises passes through.
    """
    hasher, buffer, offset = blake3(max_threads=1), memoryview(bytearray(CHUNK_BYTES)), 0
    while True:
        between()
        count = files.read_into(fd, buffer, offset)
        if count == 0:
            return offset, hasher.hexdigest()
        hasher.update(buffer[:count])
        offset += count


def real_folders(path: Path) -> Iterator[Path]:
    """Folders directly in `path` in name order, links left out; none where `path` is not there."""
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        yield path / name


def tree_bytes(path: Path) -> int:
    """Bytes of all regular files below `path`; what vanishes meanwhile counts as nothing."""
    return sum(size for _, size, regular in walk_files(path) if regular)


def walk_files(path: Path, prefix: str = "") -> Iterator[tuple[str, int, bool]]:
    """(relative path, size, is a regular file) of all below `path` that is not a folder. Links are not followed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from walk_files(path / entry.name, f"{relative}/")
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield relative, status.st_size, stat.S_ISREG(status.st_mode)
