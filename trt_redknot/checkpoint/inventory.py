"""What lies in a checkpoint directory against what its network needs: all faults are collected, then told at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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

    pieces: Mapping[Piece, StoredTensor]
    ignored: tuple[str, ...]
    # Pieces that the index places in a file that could not be read.
    unreadable: frozenset[Piece]
    # Without an index nobody knows what an unreadable file held.
    blind: bool

    def excuses(self, piece: Piece) -> bool:
        """Whether the absence of `piece` is explained by a file that is listed as unreadable already."""
        return self.blind or piece in self.unreadable


def take_inventory(directory: Path, files: WeightFiles, geometry: ModelGeometry) -> Inventory:
    """All pieces of `geometry`'s network in `files`.

    Raises:
        CheckpointError: lists every unreadable file and every missing, unexpected, misshapen or truncated tensor.
    """
    faults = Faults()
    found = _survey(directory, files, faults)
    expected: set[Piece] = set()
    for prefix, spec in _all_specs(geometry):
        for name, shape in _stored_pieces(prefix, spec, found):
            expected |= _check_piece(name, shape, spec, found, faults)
    for piece, tensor in found.pieces.items():
        if piece not in expected:
            faults.add("unexpected", tensor.name, f"{tensor.dtype} {list(tensor.shape)} in {tensor.file}")
    faults.raise_if_any(directory)
    return Inventory(pieces=found.pieces, ignored=found.ignored)


def _survey(directory: Path, files: WeightFiles, faults: Faults) -> _Found:
    pieces: dict[Piece, StoredTensor] = {}
    ignored: list[str] = []
    unreadable: set[Piece] = set()
    blind = False
    for file in files.names:
        try:
            tensors = read_header(directory, file)
        except HeaderError as error:
            faults.add("unreadable", file, str(error))
            blind = blind or files.index is None
            unreadable.update(_pieces_of(files.listed_in(file)))
            continue
        _compare_with_index(file, files, tensors, faults)
        for tensor in tensors.values():
            if is_ignored(tensor.name):
                ignored.append(tensor.name)
            else:
                _place(tensor, pieces, faults)
    return _Found(pieces=pieces, ignored=tuple(ignored), unreadable=frozenset(unreadable), blind=blind)


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


def _place(tensor: StoredTensor, pieces: dict[Piece, StoredTensor], faults: Faults) -> None:
    if tensor.truncated:
        faults.add("truncated", tensor.name, f"its bytes end after the end of {tensor.file}")
    piece = resolve(tensor.name)
    if piece is None:
        faults.add("unexpected", tensor.name, f"{tensor.dtype} {list(tensor.shape)} in {tensor.file}")
    elif piece in pieces:
        other = pieces[piece]
        faults.add("unexpected", tensor.name, f"in {tensor.file}, the same as {other.name} in {other.file}")
    else:
        pieces[piece] = tensor


def _all_specs(geometry: ModelGeometry) -> Iterator[tuple[str, TensorSpec]]:
    for spec in shared_specs(geometry):
        yield "", spec
    for layer in range(geometry.layers):
        for spec in layer_specs(geometry, layer):
            yield f"layers.{layer}.", spec


def _stored_pieces(prefix: str, spec: TensorSpec, found: _Found) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(piece name, shape of its values) of a tensor: itself, or one by one where experts are not fused."""
    whole = Piece(prefix + spec.name)
    if spec.storage is not Storage.EXPERTS or whole in found.pieces or whole in found.unreadable:
        yield whole.name, stored_shape(spec)
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


def _check_piece(name: str, shape: tuple[int, ...], spec: TensorSpec, found: _Found, faults: Faults) -> set[Piece]:
    """Checks a piece's dtype and shape, and its scales. Returns the pieces that belong to `name`."""
    values, scales = Piece(name), Piece(name, is_scale=True)
    tensor = found.pieces.get(values)
    if tensor is None:
        if not found.excuses(values):
            faults.add("missing", released_name(values), f"shape {list(shape)}")
        return {values, scales}
    if tensor.dtype == _FP8 and spec.storage in (Storage.MATRIX, Storage.EXPERTS):
        _check_shape(tensor, shape, faults)
        grid = (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))
    elif tensor.dtype in _FP4 and spec.storage is Storage.EXPERTS and shape[-1] % 2 == 0:
        _check_shape(tensor, (*shape[:-1], shape[-1] // 2), faults)
        grid = (*shape[:-1], -(-shape[-1] // FP4_BLOCK))
    elif tensor.dtype in (_INTEGER if spec.storage is Storage.TABLE else _PLAIN):
        _check_shape(tensor, shape, faults)
        return {values}
    else:
        faults.add("misshapen", tensor.name, f"dtype {tensor.dtype} is not one that {spec.name} can be stored in")
        return {values, scales}
    _check_scales(scales, grid, found, faults)
    return {values, scales}


def _check_scales(scales: Piece, shape: tuple[int, ...], found: _Found, faults: Faults) -> None:
    tensor = found.pieces.get(scales)
    if tensor is None:
        if not found.excuses(scales):
            faults.add("missing", released_name(scales), f"block scales, shape {list(shape)}")
    elif tensor.dtype not in _SCALE:
        faults.add("misshapen", tensor.name, f"dtype {tensor.dtype}, expected one of {sorted(_SCALE)}")
    else:
        _check_shape(tensor, shape, faults)


def _check_shape(tensor: StoredTensor, shape: tuple[int, ...], faults: Faults) -> None:
    if tensor.shape != shape:
        faults.add("misshapen", tensor.name, f"expected {list(shape)}, found {list(tensor.shape)} in {tensor.file}")
