"""Headers of safetensors files, read with suspicion: no length in a file is believed before it is checked.

The safetensors library refuses a damaged file as a whole. A user with a half-fetched shard wants to know which tensors
are affected, so the header is read here first, and the library has the last word on files that look whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

from safetensors import SafetensorError, safe_open

from trt_redknot.config.documents import parse_json_object

# The library's own limit.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


class HeaderError(Exception):
    """A file is no safetensors file, or is damaged in a way that leaves none of its tensors readable."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        truncated: its bytes end after the end of the file.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    truncated: bool = False


def read_header(directory: Path, file: str) -> dict[str, StoredTensor]:
    """Tensors of `directory / file` by name.

    Raises:
        HeaderError: the file is missing, unreadable, no safetensors file, or inconsistent; says why.
    """
    path = directory / file
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            header = _read_header_bytes(stream.read(_LENGTH_BYTES), size, stream)
    except OSError as error:
        raise HeaderError(error.strerror or type(error).__name__) from error
    try:
        entries = parse_json_object(header)
    except ValueError as error:
        raise HeaderError(f"garbage header: {error}") from error
    entries.pop("__metadata__", None)
    data_bytes = size - _LENGTH_BYTES - len(header)
    tensors = {name: _stored(file, name, entry, data_bytes) for name, entry in entries.items()}
    if not any(tensor.truncated for tensor in tensors.values()):
        _check_with_library(path)
    return tensors


def _read_header_bytes(prefix: bytes, size: int, stream: BinaryIO) -> bytes:
    if len(prefix) < _LENGTH_BYTES:
        raise HeaderError(f"too short for a safetensors file ({size} bytes)")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"garbage header: claims {length} bytes, at most {MAX_HEADER_BYTES} are possible")
    if length > size - _LENGTH_BYTES:
        raise HeaderError(f"truncated header: claims {length} bytes, the file has {size - _LENGTH_BYTES} more")
    header = stream.read(length)
    if len(header) < length:
        raise HeaderError(f"truncated header: claims {length} bytes, read {len(header)}")
    return header


def _stored(file: str, name: str, entry: object, data_bytes: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise HeaderError(f"garbage header: tensor {name!r} has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise HeaderError(f"tensor {name!r} has an unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"garbage header: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    start, stop = offsets
    needed = math.prod(shape) * _ITEM_BYTES[dtype]
    if stop - start != needed:
        raise HeaderError(
            f"tensor {name!r} of shape {shape} and dtype {dtype} needs {needed} bytes, has {stop - start}"
        )
    return StoredTensor(file, name, dtype, tuple(shape), truncated=stop > data_bytes)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _check_with_library(path: Path) -> None:
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise HeaderError(str(error)) from error
    except OSError as error:
        raise HeaderError(error.strerror or str(error)) from error
