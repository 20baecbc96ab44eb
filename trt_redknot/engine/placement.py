"""Rows of documents and the places they go to: in tables of the pool, among restored rows, among residual streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.contents import Part
from trt_redknot.engine.tables import ExtraRow
from trt_redknot.engine.tiles import Piece, Read
from trt_redknot.ops.cuda.rows import write_rows


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Raw rows from artifacts that a row set may pool. Found once a row set, used in every layer.

    Attributes:
        pieces: by artifact, rows of its boundary tensor.
    """

    extras: tuple[ExtraRow, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Cached rows to fetch and the places they go to, by artifact. Found once a row set, used in every layer.

    Attributes:
        places: where the rows of each piece go: int64 [k] on the device, or a slice where they go side by side.
        place: where all of them go, likewise.
    """

    rows: int
    pieces: tuple[Piece, ...]
    places: tuple[torch.Tensor | slice, ...]
    place: torch.Tensor | slice

    def read(self, part: Part, layer: int | None) -> Read:
        return Read(part=part, layer=layer, pieces=self.pieces)

    def put(self, target: torch.Tensor, taken: Sequence[torch.Tensor]) -> None:
        """Write what a source gave for the read: few tensors, or one a piece."""
        if len(taken) == len(self.places):
            for place, values in zip(self.places, taken, strict=True):
                _put(target, place, values)
        elif taken:
            _put(target, self.place, taken[0] if len(taken) == 1 else torch.cat(list(taken)))


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Tensors of documents, whole, that go to rows of a table of the pool.

    Attributes:
        targets: rows of the table, in the order of the pieces; those of neighbours are one slice.
        frames: by target, int64 [rows] on the device: the request position that the row's document begins at; None
            where that is 0 for all rows.
    """

    part: Part
    pieces: tuple[Piece, ...]
    targets: tuple[slice, ...]
    frames: tuple[torch.Tensor | None, ...]


def _put(target: torch.Tensor, places: torch.Tensor | slice, values: torch.Tensor) -> None:
    if isinstance(places, slice):
        target[places].copy_(values)
    else:
        write_rows(target, places, values)


def place_of(rows: NDArray[np.int64], there: torch.Tensor) -> torch.Tensor | slice:
    """Rows as a slice where they go side by side, else as they are on the device."""
    if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows) and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return there


def side_by_side(targets: Sequence[slice], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Cut rows of tensors and of slices, both one after the other and equally many, so that each goes into one."""
    slices = iter(targets)
    left = slice(0, 0)
    for tensor in tensors:
        done = 0
        while done < tensor.shape[0]:
            if left.start == left.stop:
                left = next(slices)
                continue
            count = min(left.stop - left.start, tensor.shape[0] - done)
            whole = count == tensor.shape[0]
            yield slice(left.start, left.start + count), tensor if whole else tensor[done : done + count]
            left, done = slice(left.start + count, left.stop), done + count
