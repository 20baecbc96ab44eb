"""A set of rows that runs, how it is cut into chunks, and which rank owns which rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.collectives import Collectives
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.ops.cuda.rows import write_rows
from trt_redknot.partition import even_split


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows that go through a stage together.

    Attributes:
        rows: of the row set.
        counts: rows each rank owns; owners are consecutive inside the chunk.
        own: this rank's rows, in its own storage.
        own_rows: the same rows, in the row set.
    """

    rows: slice
    counts: tuple[int, ...]
    own: slice
    own_rows: slice


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows that run through some layers, those that run all heads first.

    Every chunk is spread over all ranks, so that no rank gets only late rows (which see more entries than early ones).
    Chunks are as few as `chunk_rows` allows and of equal size, up to what lets all ranks have equally many rows.

    Attributes:
        sequences: int64 [R]: which sequence of the batch a row belongs to.
        positions: int64 [R]: request position.
        full_rows: the first so many rows run all heads.
        chunk_rows: rows of a chunk, at most.
    """

    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]
    full_rows: int
    rank: int
    size: int
    chunk_rows: int

    @property
    def rows(self) -> int:
        return len(self.positions)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        chunks, own_start = [], 0
        step = self._rows_a_chunk()
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            shares = even_split(stop - start, self.size)
            mine = shares[self.rank]
            chunks.append(
                Chunk(
                    rows=slice(start, stop),
                    counts=tuple(len(share) for share in shares),
                    own=slice(own_start, own_start + len(mine)),
                    own_rows=slice(start + mine.start, start + mine.stop),
                )
            )
            own_start += len(mine)
        return tuple(chunks)

    def _rows_a_chunk(self) -> int:
        fewest = -(-self.rows // self.chunk_rows)
        equal = -(-self.rows // max(1, fewest))
        whole = -(-equal // self.size) * self.size
        return max(1, whole if whole <= self.chunk_rows else equal)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """Rank that owns each row: [R]."""
        return np.concatenate(
            [np.empty(0, dtype=np.int64)] + [np.repeat(np.arange(self.size), chunk.counts) for chunk in self.chunks]
        )

    @cached_property
    def own_rows(self) -> NDArray[np.int64]:
        """Rows this rank owns, in the order of its own storage."""
        return np.flatnonzero(self.owners == self.rank)

    def full_in(self, chunk: Chunk) -> int:
        """How many of the chunk's rows run all heads."""
        return max(0, min(self.full_rows, int(chunk.rows.stop)) - int(chunk.rows.start))


def redistribute(collectives: Collectives, own: torch.Tensor, old: RowSet, new: RowSet) -> torch.Tensor:
    """Move own rows of one row set of a single sequence to the owners of another: [own rows of new, ...]. Rows that
    are not in the old set are zeros, for the caller to fill."""
    if np.array_equal(old.positions, new.positions) and np.array_equal(old.owners, new.owners):
        return own
    length = int(max(old.positions.max(initial=-1), new.positions.max(initial=-1))) + 1
    new_owner = np.full(length, -1, dtype=np.int64)
    new_owner[new.positions] = new.owners
    old_owner = np.full(length, -1, dtype=np.int64)
    old_owner[old.positions] = old.owners

    sent = old.positions[old.own_rows]
    destination = new_owner[sent]
    kept = np.flatnonzero(destination >= 0)
    order = kept[np.lexsort((sent[kept], destination[kept]))]
    send_counts = np.bincount(destination[order], minlength=old.size)

    wanted = new.positions[new.own_rows]
    source = old_owner[wanted]
    arriving = np.flatnonzero(source >= 0)
    slots = arriving[np.lexsort((wanted[arriving], source[arriving]))]
    receive_counts = np.bincount(source[slots], minlength=old.size)

    sent_rows, places = ArrayBatch([order, slots]).upload(own.device)
    received = collectives.all_to_all(own.index_select(0, sent_rows), send_counts.tolist(), receive_counts.tolist())
    moved = own.new_zeros((len(wanted), *own.shape[1:]))
    write_rows(moved, places, received)
    return moved
