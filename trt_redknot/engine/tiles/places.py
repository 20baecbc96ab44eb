"""Where the tiles of a layer lie in a slot of the ring: those of all artifacts side by side, so that they are decoded
as one tensor. Worked out once for all layers that read alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.formats import TensorCodec
from trt_redknot.engine.tiles.reads import Read

_ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive pieces of a read whose rows lie side by side, stored alike.

    Attributes:
        offset: of its first byte, in the tiles of the read.
        dtype, row: dtype and shape of a stored row.
        starts: first row of every piece in the run, and the end of the last one.
    """

    codec: TensorCodec
    offset: int
    dtype: torch.dtype
    row: tuple[int, ...]
    row_bytes: int
    starts: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.starts[-1] * self.row_bytes

    def view(self, memory: torch.Tensor, offset: int, first: int, last: int) -> torch.Tensor:
        """Its pieces `first` to `last` in uint8 memory where the read's tiles begin at `offset`."""
        begin, end = self.starts[first], self.starts[last + 1]
        start = offset + self.offset + begin * self.row_bytes
        flat = memory[start : start + (end - begin) * self.row_bytes]
        return flat.view(self.dtype).view((end - begin, *self.row))


@dataclass(kw_only=True, eq=False)
class ReadPlace:
    """The place of one read in a slot of the ring, and in the staging memory of those that ask for rows.

    Attributes:
        runs: of all its pieces.
        run_of: by piece, its run and its place in that.
        offset, staged: bytes in front of it.
    """

    runs: tuple[Run, ...]
    run_of: tuple[tuple[int, int], ...]
    offset: int
    staged: int
    _views: dict[tuple[int, bool, int, int, int], torch.Tensor] = field(default_factory=dict)

    def view(self, memories: Sequence[torch.Tensor], slot: int, first: int, last: int, *, staged: bool) -> torch.Tensor:
        """Pieces `first` to `last`, of one run, in a slot of the ring or of its staging memory."""
        run, inside = self.run_of[first]
        key = (slot, staged, run, inside, last - first)
        found = self._views.get(key)
        if found is None:
            offset = self.staged if staged else self.offset
            found = self.runs[run].view(memories[slot], offset, inside, inside + last - first)
            self._views[key] = found
        return found


@dataclass(frozen=True, kw_only=True)
class LayerPlaces:
    """The places of all reads of a layer.

    Attributes:
        reads: in their order; a read that comes twice has one place.
        bytes, staged_bytes: of a slot, and of its staging memory.
    """

    reads: tuple[ReadPlace, ...]
    bytes: int
    staged_bytes: int


class Placing:
    """Places the reads of some layers. Layers that read the same parts of the same pieces share their places."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Part, int], tuple[Run, ...]] = {}
        self._layers: dict[tuple[tuple[Part, int], ...], LayerPlaces] = {}

    def of(self, reads: Sequence[Read]) -> LayerPlaces:
        """StoreError, or whatever else an artifact raises, where its tensors cannot be looked at."""
        key = tuple((read.part, id(read.pieces)) for read in reads)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._place(reads)
        return found

    def _place(self, reads: Sequence[Read]) -> LayerPlaces:
        offset = staged = 0
        places: dict[tuple[Part, int | None, int], ReadPlace] = {}
        for read in reads:
            if read.key in places:
                continue
            runs = self._runs_of(read)
            size = aligned(runs[-1].offset + runs[-1].bytes)
            run_of = tuple((at, inside) for at, run in enumerate(runs) for inside in range(len(run.starts) - 1))
            places[read.key] = ReadPlace(runs=runs, run_of=run_of, offset=offset, staged=staged)
            offset += size
            staged += size if read.pieces[0].index is not None else 0
        return LayerPlaces(reads=tuple(places[read.key] for read in reads), bytes=offset, staged_bytes=staged)

    def _runs_of(self, read: Read) -> tuple[Run, ...]:
        key = (read.part, id(read.pieces))
        if key not in self._runs:
            self._runs[key] = _runs_of(read)
        return self._runs[key]


def _runs_of(read: Read) -> tuple[Run, ...]:
    """A piece continues the run of the one before it where it is stored alike."""
    stored: list[tuple[TensorCodec, torch.dtype, tuple[int, ...]]] = []
    for piece in read.pieces:
        tensor = piece.reader.raw(read.part, read.layer)
        stored.append((piece.reader.codec(read.part), tensor.dtype, tuple(tensor.shape[1:])))
    runs: list[Run] = []
    offset = first = 0
    while first < len(stored):
        last = first
        while last + 1 < len(stored) and stored[last + 1] == stored[first]:
            last += 1
        starts = [0]
        for piece in read.pieces[first : last + 1]:
            starts.append(starts[-1] + piece.rows)
        codec, dtype, row = stored[first]
        row_bytes = dtype.itemsize
        for size in row:
            row_bytes *= size
        run = Run(codec=codec, offset=offset, dtype=dtype, row=row, row_bytes=row_bytes, starts=tuple(starts))
        runs.append(run)
        offset = aligned(offset + run.bytes)
        first = last + 1
    return tuple(runs)


def aligned(size: int) -> int:
    """The next place that any kernel can read from."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
