"""Builds the tables of a step: where each row's keys lie, which entries are written, which raw rows are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.pool import SequenceState, tail_rows
from trt_redknot.engine.rowset import RowSet
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.request.segments import Segment
from trt_redknot.request.visibility import visible_entries


@dataclass(frozen=True, kw_only=True)
class ExtraRow:
    """A raw row that does not run in this step but may be pooled.

    Attributes:
        exact: it is what the full context would give (a row of an exact prefix, or one that ran in an earlier step).
            Rows that are not may feed a fresh segment's first window, but never refresh a document's entry.
    """

    sequence: int
    position: int
    exact: bool


@dataclass(frozen=True, kw_only=True)
class RatioTables:
    """Tables shared by all layers of one compression ratio (0: no compressor).

    Attributes:
        entry_count: compressed entries of all sequences, as the host knows them.
        extras_kept: the extra raw rows are in the pool's tails already; only rows of the step are to be kept.
        tail_targets, tail_sources: int64: raw rows to keep for decoding, as rows of the pool's tails and of the raw
            rows, or (with `extras_kept`) of the step's rows.
        tail_whole: the sources are all of the step's rows in their order.
    """

    attention: AttentionTable
    compress: CompressTable | None
    entry_count: int
    extras_kept: bool
    tail_targets: torch.Tensor
    tail_sources: torch.Tensor
    tail_whole: bool


@dataclass(frozen=True, kw_only=True)
class RatioArrays:
    """What :class:`RatioTables` is made of, on the host: int64, as the attributes of the tables say.

    Attributes:
        entries, slots, positions: of the :class:`CompressTable`; None where the layers have no compressor.
    """

    extras_kept: bool
    segments: NDArray[np.int64]
    visible: NDArray[np.int64]
    entries: NDArray[np.int64] | None
    slots: NDArray[np.int64] | None
    positions: NDArray[np.int64] | None
    tail_targets: NDArray[np.int64]
    tail_sources: NDArray[np.int64]

    @property
    def tail_whole(self) -> bool:
        """Whether all of the step's rows are kept, in their order."""
        return self.extras_kept and np.array_equal(self.tail_sources, np.arange(len(self.visible)))

    def arrays(self) -> list[NDArray[np.int64]]:
        """All of them, in the order that `tables` takes them in."""
        compress = [self.entries, self.slots, self.positions]
        there = [array for array in compress if array is not None]
        return [self.segments, self.visible, self.tail_targets, self.tail_sources, *there]

    def tables(
        self, there: Iterator[torch.Tensor], *, positions: torch.Tensor, row_segments: torch.Tensor
    ) -> RatioTables:
        """The tables over tensors of the same numbers, and of those that all ratios share."""
        segments, visible, targets, sources = (next(there) for _ in range(4))
        compress = None
        if self.entries is not None:
            entries, slots, first = (next(there) for _ in range(3))
            compress = CompressTable(entries=entries, slots=slots, positions=first)
        return RatioTables(
            attention=AttentionTable(
                segments=segments, row_segments=row_segments, positions=positions, visible=visible
            ),
            compress=compress,
            entry_count=int(self.segments[:, -1].sum()),
            extras_kept=self.extras_kept,
            tail_targets=targets,
            tail_sources=sources,
            tail_whole=self.tail_whole,
        )


def _segment_records(sequences: Sequence[SequenceState], ratio: int) -> NDArray[np.int64]:
    """One record a sequence: its rows lie side by side in the pool, all in the frame of the request."""
    return np.array(
        [
            (
                0, state.length, state.latent_offset, state.entry_offsets.get(ratio, 0),
                sum(segment.entries(ratio) for segment in state.segments),
            )
            for state in sequences
        ],
        dtype=np.int64,
    )  # fmt: skip


def row_segments_of(rows: RowSet) -> NDArray[np.int64]:
    """The record of each row's sequence, and one past it: [R, 2]."""
    return np.stack([rows.sequences, rows.sequences + 1], axis=1)


def _visible(sequences: Sequence[SequenceState], rows: RowSet, ratio: int) -> NDArray[np.int64]:
    if len(sequences) == 1:
        return visible_entries(sequences[0].segments, rows.positions, ratio)
    visible = np.zeros(rows.rows, dtype=np.int64)
    for index, state in enumerate(sequences):
        mine = rows.sequences == index
        visible[mine] = visible_entries(state.segments, rows.positions[mine], ratio)
    return visible


def _pool_positions(segment: Segment, windows: NDArray[np.int64], ratio: int, overlap: bool) -> NDArray[np.int64]:
    """Request position of every slot of each window, -1 where there is none: [windows, w * ratio]."""
    first = segment.start + windows[:, None] * ratio
    own = first + np.arange(ratio)[None, :]
    own = np.where(own < segment.stop, own, -1)
    if not overlap:
        return own
    # The overlap reaches over the segment's border: the rows before it in the request, whatever segment they are of.
    before = np.maximum(first - ratio + np.arange(ratio)[None, :], -1)
    return np.concatenate([before, own], axis=1)


@dataclass(frozen=True, kw_only=True)
class _RawIndex:
    """Raw row of positions `origin`, `origin + 1`, ... of one sequence, -1 where there is none, and whether it is
    there, is exact, runs. Before the origin nothing runs and nothing is pooled by what does.

    The last element stands for no position: it has no row, and an entry does not miss it.
    """

    origin: int
    row: NDArray[np.int64]
    there: NDArray[np.bool_]
    exact: NDArray[np.bool_]
    running: NDArray[np.bool_]

    def places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where positions are in the arrays; -1 (no position) stays."""
        return positions if self.origin == 0 else np.where(positions < 0, -1, positions - self.origin)


def _raw_indices(
    sequences: Sequence[SequenceState], rows: RowSet, ratio: int, extras: Sequence[ExtraRow]
) -> list[_RawIndex]:
    indices = []
    for index, state in enumerate(sequences):
        mine = np.flatnonzero(rows.sequences == index)
        positions = rows.positions[mine]
        known = [(raw, extra) for raw, extra in enumerate(extras) if extra.sequence == index]
        # A running row's window, and the one before it, begin less than two windows before the row.
        first = min([*(extra.position for _, extra in known), int(positions.min(initial=state.length))])
        origin = max(0, first - 2 * ratio)
        size = state.length - origin + 1
        row = np.full(size, -1, dtype=np.int64)
        exact, running = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        for raw, extra in known:
            row[extra.position - origin], exact[extra.position - origin] = raw, extra.exact
        row[positions - origin] = len(extras) + mine
        exact[positions - origin] = True
        running[positions - origin] = True
        there = row >= 0
        there[-1] = exact[-1] = True
        indices.append(_RawIndex(origin=origin, row=row, there=there, exact=exact, running=running))
    return indices


def _compress_arrays(
    sequences: Sequence[SequenceState], raws: Sequence[_RawIndex], ratio: int, overlap: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The arrays of a :class:`CompressTable`: entries, slots, positions. Raw rows are the extras, then the step's rows.

    An entry is written when one of its window's rows runs in this step and every row it pools is there.
    """
    entries, slots, positions = [], [], []
    width = (2 if overlap else 1) * ratio
    for state, raw in zip(sequences, raws, strict=True):
        offset = state.entry_offsets[ratio]
        for segment in state.segments:
            count = segment.entries(ratio)
            windows = _touched(segment, raw, ratio, count)
            places = raw.places(_pool_positions(segment, windows, ratio, overlap))
            # Every row it pools is there; a document's entry also needs them all to be exact.
            usable = raw.exact if segment.is_document else raw.there
            written = usable[places].all(axis=1)
            if not written.all():
                windows, places = windows[written], places[written]
            entries.append(offset + windows)
            slots.append(raw.row[places])
            positions.append(segment.start + windows * ratio)
            offset += count
    return np.concatenate(entries), np.concatenate(slots).reshape(-1, width), np.concatenate(positions)


def _touched(segment: Segment, raw: _RawIndex, ratio: int, count: int) -> NDArray[np.int64]:
    """The windows, of the segment's first `count`, that a running row lies in."""
    skipped = min(count, max(0, -(-(raw.origin - segment.start) // ratio)))
    start = segment.start + skipped * ratio - raw.origin
    running = raw.running[max(0, start) : max(0, segment.stop - raw.origin)]
    left = count - skipped
    whole = min(left, len(running) // ratio)
    touched = np.zeros(left, dtype=bool)
    touched[:whole] = running[: whole * ratio].reshape(whole, ratio).any(axis=1)
    if whole < left:
        touched[whole] = running[whole * ratio :].any()
    return skipped + np.flatnonzero(touched)


def _tail_rows(
    sequences: Sequence[SequenceState], raws: Sequence[_RawIndex], keep: int, kept: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    targets, sources = [], []
    for state, raw in zip(sequences, raws, strict=True):
        positions = np.arange(max(raw.origin, state.length - keep), state.length)
        there = raw.row[positions - raw.origin] >= 0 if kept is None else raw.running[positions - raw.origin]
        positions = positions[there]
        targets.append(state.slot * keep + positions % max(keep, 1))
        sources.append(raw.row[positions - raw.origin] - (kept or 0))
    return np.concatenate(targets), np.concatenate(sources)


def kinds_by_ratio(geometry: ModelGeometry) -> dict[int, AttentionKind]:
    """The compression ratios of the network's layers, in the order of its first layers of each."""
    ratios = {
        AttentionKind.SLIDING: 0,
        AttentionKind.CSA: geometry.csa_ratio,
        AttentionKind.HCA: geometry.hca_ratio,
    }
    return {ratios[kind]: kind for kind in dict.fromkeys(geometry.attention_kinds)}


def ratio_arrays(
    kind: AttentionKind,
    ratio: int,
    sequences: Sequence[SequenceState],
    rows: RowSet,
    extras: Sequence[ExtraRow],
    *,
    extras_kept: bool = False,
) -> RatioArrays:
    """Tables of a step for the layers of one ratio.

    Args:
        extras: the raw rows that do not run in the step.
        extras_kept: they are in the pool's tails already.
    """
    entries = slots = positions = None
    targets = sources = np.empty(0, dtype=np.int64)
    if ratio:
        raws = _raw_indices(sequences, rows, ratio, extras)
        entries, slots, positions = _compress_arrays(sequences, raws, ratio, kind is AttentionKind.CSA)
        kept = len(extras) if extras_kept else None
        targets, sources = _tail_rows(sequences, raws, tail_rows(kind, ratio), kept)
    return RatioArrays(
        extras_kept=extras_kept,
        segments=_segment_records(sequences, ratio), visible=_visible(sequences, rows, ratio), entries=entries,
        slots=slots, positions=positions, tail_targets=targets, tail_sources=sources,
    )  # fmt: skip
