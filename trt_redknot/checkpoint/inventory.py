"""What lies in a checkpoint directory against what its network needs: all faults are collected, then told at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trt_redknot.checkpoint.codecs import FP4_BLOCK, FP8_BLOCK
from trt_redknot.checkpoint.faults import Faults
from trt_redknot.checkpoint.files import WeightFiles
from trt_redknot.checkpoint.headers import HeaderError, StoredTensor, read_header
from trt_redknot.checkpoint.names import Piece, is_ignored, released_name, resolve
from trt_redknot.checkpoint.specs import Storage, TensorSpec, layer_specs, shared_specs
from trt_redknot.config.geometry import ModelGeometry

_PLAIN = frozenset({"F32", "BF16", "F16"})
_FP8 = "F8_E4M3"
_FP4 = frozenset({"I8", "U8"})
_SCALE = frozenset({"F8_E8M0", "F32"})
_INTEGER = frozenset({"I32", "I64"})


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Tensors of a checkpoint by piece.

    Attributes:
        pieces: where each piece of the network lies.
        ignored: tensors of the multi-token-prediction layers, by the name they have in their file.
    """

    pieces: Mapping[Piece, StoredTensor]
    ignored: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the headers of all files hold."""

    pieces: dict[Piece, StoredTensor] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    # Pieces that the index places in a file that could not be read.
    unreadable: set[Piece] = field(default_factory=set)
    # Without an index nobody knows what an unreadable file held.
    blind: bool = False


def take_inventory(directory: Path, files: WeightFiles, geometry: ModelGeometry) -> Inventory:
    """All pieces of `geometry`'s network in `files`.

    Raises:
        CheckpointError: lists every unreadable file and every missing, unexpected, misshapen or truncated tensor.
    """
    faults = Faults()
    found = _survey(directory, files, faults)
    expected: set[Piece] = set()
    for prefix, spec in _all_specs(geometry):
        for name, shape in _stored_pieces(prefix, spec, found.pieces):
            expected.update(_check_piece(name, shape, spec, found, faults))
    for piece, tensor in found.pieces.items():
        if piece not in expected:
            faults.add("unexpected", tensor.name, f"{tensor.dtype} {list(tensor.shape)} in {tensor.file}")
    faults.raise_if_any(directory)
    return Inventory(pieces=found.pieces, ignored=tuple(found.ignored))


def _survey(directory: Path, files: WeightFiles, faults: Faults) -> _Found:
    found = _Found()
    blind = False
    for file in files.names:
        try:
            tensors = read_header(directory, file)
        except HeaderError as error:
            faults.add("unreadable", file, str(error))
            blind = blind or files.index is None
            found.unreadable.update(_pieces_of(files.listed_in(file)))
            continue
        _compare_with_index(file, files, tensors, faults)
        for tensor in tensors.values():
            _place(tensor, found, faults)
    return _Found(pieces=found.pieces, ignored=found.ignored, unreadable=found.unreadable, blind=blind)


def _pieces_of(names: Iterable[str]) -> Iterator[Piece]:
    for name in names:
        piece = resolve(name)
        if piece is not None:
            yield piece


def _compare_with_index(file: str, files: WeightFiles, tensors: Mapping[str, StoredTensor], faults: Faults) -> None:
    if files.index is None:
        return
    listed = set(files.listed_in(file))
    for name in sorted(listed - tensors.keys()):
        faults.add("missing", name, f"the index places it in {file}, which does not hold it")
    for name in sorted(tensors.keys() - listed):
        place = files.index.get(name)
        faults.add("unexpected", name, f"{file} holds it, the index places it {'in ' + place if place else 'nowhere'}")


def _place(tensor: StoredTensor, found: _Found, faults: Faults) -> None:
    if is_ignored(tensor.name):
        found.ignored.append(tensor.name)
        return
    if tensor.truncated:
        faults.add("truncated", tensor.name, f"its bytes end after the end of {tensor.file}")
    piece = resolve(tensor.name)
    if piece is None:
        faults.add("unexpected", tensor.name, f"{tensor.dtype} {list(tensor.shape)} in {tensor.file}")
    elif piece in found.pieces:
        other = found.pieces[piece]
        faults.add("unexpected", tensor.name, f"in {tensor.file}, the same as {other.name} in {other.file}")
    else:
        found.pieces[piece] = tensor


def _all_specs(geometry: ModelGeometry) -> Iterator[tuple[str, TensorSpec]]:
    for spec in shared_specs(geometry):
        yield "", spec
    for layer in range(geometry.layers):
        for spec in layer_specs(geometry, layer):
            yield f"layers.{layer}.", spec


def _stored_pieces(
    prefix: str, spec: TensorSpec, pieces: Mapping[Piece, StoredTensor]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(piece name, shape of its values) of a tensor: itself, or one by one where experts are not fused."""
    if spec.storage is not Storage.EXPERTS or Piece(prefix + spec.name) in pieces:
        yield prefix + spec.name, stored_shape(spec)
        return
    experts, rows, columns = spec.shape
    for expert in range(experts):
        for part, count in expert_parts(spec.name, rows):
            yield f"{prefix}experts.{expert}.{part}", (count, columns)


def expert_parts(name: str, rows: int) -> tuple[tuple[str, int], ...]:
    """(part, rows) of one expert of a fused tensor, in order."""
    return (("gate", rows // 2), ("up", rows // 2)) if name == "experts.gate_up" else (("down", rows),)


def stored_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Shape in files: grouped matrices are stored with their groups' rows one below the other."""
    if spec.storage is Storage.MATRIX and len(spec.shape) == 3:
        groups, rows, columns = spec.shape
        return (groups * rows, columns)
    return spec.shape


def _check_piece(name: str, shape: tuple[int, ...], spec: TensorSpec, found: _Found, faults: Faults) -> Iterator[Piece]:
    """The pieces that belong to `name`: its values, and its scales where it is stored in blocks."""
    values, scales = Piece(name), Piece(name, is_scale=True)
    yield values
    tensor = found.pieces.get(values)
    if tensor is None:
        yield scales
        if values not in found.unreadable and not found.blind:
            faults.add("missing", released_name(values), f"shape {list(shape)}")
        return
    expected_shape, scale_shape = shape, None
    if tensor.dtype == _FP8 and spec.storage in (Storage.MATRIX, Storage.EXPERTS):
        scale_shape = (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))
    elif tensor.dtype in _FP4 and spec.storage is Storage.EXPERTS and shape[-1] % 2 == 0:
        expected_shape = (*shape[:-1], shape[-1] // 2)
        scale_shape = (*shape[:-1], -(-shape[-1] // FP4_BLOCK))
    elif tensor.dtype not in (_INTEGER if spec.storage is Storage.TABLE else _PLAIN):
        faults.add("misshapen", tensor.name, f"dtype {tensor.dtype} is not one that {spec.name} can be stored in")
        yield scales
        return
    _check_shape(tensor, expected_shape, faults)
    if scale_shape is not None:
        yield scales
        _check_scales(scales, scale_shape, found, faults)


def _check_scales(scales: Piece, shape: tuple[int, ...], found: _Found, faults: Faults) -> None:
    tensor = found.pieces.get(scales)
    if tensor is None:
        if scales not in found.unreadable and not found.blind:
            faults.add("missing", released_name(scales), f"block scales, shape {list(shape)}")
    elif tensor.dtype not in _SCALE:
        faults.add("misshapen", tensor.name, f"dtype {tensor.dtype}, expected one of {sorted(_SCALE)}")
    else:
        _check_shape(tensor, shape, faults)


def _check_shape(tensor: StoredTensor, shape: tuple[int, ...], faults: Faults) -> None:
    if tensor.shape != shape:
        faults.add("misshapen", tensor.name, f"expected {list(shape)}, found {list(tensor.shape)} in {tensor.file}")
