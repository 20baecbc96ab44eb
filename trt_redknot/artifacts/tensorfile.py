"""Safetensors files as the store needs them: size known before writing, digest taken while writing, sparse reads.

Any safetensors reader opens what is written here. The header is built by hand because its exact length enters the
preflight of the store's capacity. Reading checks every number of the header against the file before it is used, then
maps the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.files import Files, read_exactly
from trt_redknot.config.documents import parse_json_object

MAX_HEADER_BYTES = 1 << 20
_ALIGNMENT = 8
_LENGTH_BYTES = 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Name, dtype and shape of one tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def file_bytes(entries: Sequence[TensorEntry]) -> int:
    """Exact size of the file that holds `entries`."""
    return len(_header(entries)) + sum(entry.bytes for entry in entries)


def file_chunks(entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of the file that holds `tensors`, in order, without a copy of them."""
    yield memoryview(_header(entries))
    for entry in _in_file_order(entries):
        tensor = tensors[entry.name]
        assert tensor.dtype is entry.dtype, f"{entry.name}: {tensor.dtype} against {entry.dtype}"
        assert tuple(tensor.shape) == entry.shape, f"{entry.name}: {tuple(tensor.shape)} against {entry.shape}"
        if entry.bytes:
            yield _bytes_of(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    octets: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return octets.data


def _in_file_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    # Wider dtypes first: every tensor then starts at a multiple of its item size.
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def _header(entries: Sequence[TensorEntry]) -> bytes:
    table, start = {}, 0
    for entry in _in_file_order(entries):
        stop = start + entry.bytes
        table[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TensorFile:
    """A tensor file mapped for reading; no byte of a tensor is touched before it is asked for.

    Args:
        fd: an open file. It is not kept: the map outlives it.
        label: how the file is named in errors.

    Raises:
        ArtifactError: FILE_HEADER where the header does not describe the file, FILE_UNREADABLE where it cannot be read.
    """

    def __init__(self, fd: int, size: int, *, label: str, files: Files) -> None:
        self._label = label
        start = self._data_start(fd, size, files)
        header = self._read(fd, files, start - _LENGTH_BYTES, _LENGTH_BYTES)
        self._entries = self._parse(header, size - start)
        self._start = start
        try:
            # The descriptor's own path: what is mapped is the file that was checked, whatever its name means by now.
            storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, size)
        except RuntimeError as error:
            raise ArtifactError(ArtifactFault.FILE_UNREADABLE, f"cannot be mapped: {error}", path=label) from error
        assert isinstance(storage, torch.UntypedStorage)
        self._storage = storage

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def tensor(self, name: str) -> torch.Tensor:
        """View of the mapped tensor. Writing to it changes only this process's private pages."""
        if name not in self._entries:
            raise self._malformed("holds no such tensor", expected=name, found=list(self._entries))
        entry, offset = self._entries[name]
        flat = torch.empty(0, dtype=torch.uint8).set_(self._storage, self._start + offset, (entry.bytes,), (1,))
        return flat.view(entry.dtype).reshape(entry.shape)

    def _data_start(self, fd: int, size: int, files: Files) -> int:
        if size < _LENGTH_BYTES:
            raise self._malformed("is too short for a header", expected=f"{_LENGTH_BYTES} bytes", found=size)
        length = int.from_bytes(self._read(fd, files, _LENGTH_BYTES, 0), "little")
        limit = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
        if not 2 <= length <= limit or length % _ALIGNMENT:
            raise self._malformed("declares an impossible header length", expected=f"2 to {limit}", found=length)
        return _LENGTH_BYTES + length

    def _read(self, fd: int, files: Files, size: int, offset: int) -> bytes:
        try:
            return read_exactly(files, fd, size, offset)
        except (OSError, EOFError) as error:
            raise ArtifactError(ArtifactFault.FILE_UNREADABLE, f"cannot be read: {error}", path=self._label) from error

    def _parse(self, header: bytes, data_bytes: int) -> dict[str, tuple[TensorEntry, int]]:
        try:
            table = parse_json_object(header)
        except ValueError as error:
            raise self._malformed("has a header that is not a JSON object", found=error) from error
        entries, covered = {}, 0
        for name, described in table.items():
            entry, start, stop = self._entry(name, described)
            if start != covered or stop - start != entry.bytes or start % entry.dtype.itemsize:
                raise self._malformed(f"has impossible offsets for {name!r}", found=[start, stop])
            entries[name] = (entry, start)
            covered = stop
        if covered != data_bytes:
            raise self._malformed("is not covered by its tensors", expected=f"{data_bytes} bytes", found=covered)
        return entries

    def _entry(self, name: str, described: object) -> tuple[TensorEntry, int, int]:
        if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
            raise self._malformed(f"describes {name!r} wrongly", expected="dtype, shape, data_offsets", found=described)
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise self._malformed(f"has an unknown dtype for {name!r}", expected=list(_DTYPES), found=dtype)
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
            raise self._malformed(f"has an impossible shape or offsets for {name!r}", found=[shape, offsets])
        return TensorEntry(name=name, dtype=_DTYPES[dtype], shape=tuple(shape)), offsets[0], offsets[1]

    def _malformed(self, problem: str, *, expected: object | None = None, found: object | None = None) -> ArtifactError:
        return ArtifactError(
            ArtifactFault.FILE_HEADER, f"a tensor file {problem}", expected=expected, found=found, path=self._label
        )


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)
