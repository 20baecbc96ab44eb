"""Builds the tables of a step: where each row's keys lie, which entries are written, which raw rows are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.pool import SequenceState, tail_rows
from trt_redknot.engine.rowset import RowSet
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.request.segments import Segment, SegmentKind
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
        tail_targets, tail_sources: int64: raw rows to keep for decoding, as rows of the pool's tails and of the raw
            rows.
    """

    attention: AttentionTable
    compress: CompressTable | None
    tail_targets: torch.Tensor
    tail_sources: torch.Tensor


def attention_table(
    sequences: Sequence[SequenceState], rows: RowSet, ratio: int, device: torch.device
) -> AttentionTable:
    """Where the keys of the step's rows lie, for layers of one ratio."""
    records: list[tuple[int, int, int, int, int]] = []
    spans = []
    for state in sequences:
        entry_offset = state.entry_offsets.get(ratio, 0)
        first = len(records)
        for segment in state.segments:
            count = segment.entries(ratio)
            records.append((segment.start, segment.stop, state.latent_offset + segment.start, entry_offset, count))
            entry_offset += count
        spans.append((first, len(records)))
    visible = np.zeros(rows.rows, dtype=np.int64)
    for index, state in enumerate(sequences):
        mine = rows.sequences == index
        visible[mine] = visible_entries(state.segments, rows.positions[mine], ratio)
    return AttentionTable(
        segments=torch.tensor(records, dtype=torch.int64, device=device),
        row_segments=torch.from_numpy(np.asarray(spans, dtype=np.int64)[rows.sequences]).to(device),
        positions=torch.from_numpy(rows.positions).to(device),
        visible=torch.from_numpy(visible).to(device),
    )


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


def _refreshed(
    segment: Segment, slots: NDArray[np.int64], positions: NDArray[np.int64], exact: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which windows have all the rows they pool. A document's entry also needs them all to be exact."""
    there = (slots >= 0) | (positions < 0)
    if segment.kind is not SegmentKind.FRESH:
        there &= exact | (positions < 0)
    complete: NDArray[np.bool_] = np.asarray(there.all(axis=1))
    return complete


@dataclass(frozen=True, kw_only=True)
class _RawIndex:
    """Raw row of every position of one sequence, -1 where there is none, and whether it is exact."""

    row: NDArray[np.int64]
    exact: NDArray[np.bool_]


def _raw_index(state: SequenceState, index: int, rows: RowSet, extras: Sequence[ExtraRow]) -> _RawIndex:
    row = np.full(state.length, -1, dtype=np.int64)
    exact = np.zeros(state.length, dtype=bool)
    for raw, extra in enumerate(extras):
        if extra.sequence == index:
            row[extra.position], exact[extra.position] = raw, extra.exact
    mine = np.flatnonzero(rows.sequences == index)
    row[rows.positions[mine]] = len(extras) + mine
    exact[rows.positions[mine]] = True
    return _RawIndex(row=row, exact=exact)


def compress_table(
    sequences: Sequence[SequenceState],
    rows: RowSet,
    ratio: int,
    overlap: bool,
    extras: Sequence[ExtraRow],
    device: torch.device,
) -> CompressTable:
    """Entries this step writes. Raw rows are the extras, then the step's rows.

    An entry is written when one of its window's rows runs in this step and every row it pools is there.
    """
    entries, slots, frames = [], [], []
    width = (2 if overlap else 1) * ratio
    for index, state in enumerate(sequences):
        raw = _raw_index(state, index, rows, extras)
        running = np.zeros(state.length, dtype=bool)
        running[rows.positions[rows.sequences == index]] = True
        offset = state.entry_offsets[ratio]
        for segment in state.segments:
            count = segment.entries(ratio)
            touched = np.unique(np.flatnonzero(running[segment.start : segment.stop]) // ratio)
            windows = touched[touched < count]
            positions = _pool_positions(segment, windows, ratio, overlap)
            found = np.where(positions >= 0, raw.row[np.maximum(positions, 0)], -1)
            exact = raw.exact[np.maximum(positions, 0)] & (positions >= 0)
            written = _refreshed(segment, found, positions, exact)
            entries.append(offset + windows[written])
            slots.append(found[written])
            frames.append(windows[written] * ratio)
            offset += count
    return CompressTable(
        entries=torch.from_numpy(np.concatenate(entries)).to(device),
        slots=torch.from_numpy(np.concatenate(slots).reshape(-1, width)).to(device),
        positions=torch.from_numpy(np.concatenate(frames)).to(device),
    )


def _tail_rows(
    sequences: Sequence[SequenceState], rows: RowSet, keep: int, extras: Sequence[ExtraRow]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    targets, sources = [], []
    for index, state in enumerate(sequences):
        raw = _raw_index(state, index, rows, extras).row
        positions = np.arange(max(0, state.length - keep), state.length)
        positions = positions[raw[positions] >= 0]
        targets.append(state.slot * keep + positions % max(keep, 1))
        sources.append(raw[positions])
    return np.concatenate(targets), np.concatenate(sources)


def ratio_tables(
    geometry: ModelGeometry,
    sequences: Sequence[SequenceState],
    rows: RowSet,
    extras: Mapping[int, Sequence[ExtraRow]],
    device: torch.device,
) -> dict[int, RatioTables]:
    """Tables of a step by ratio. `extras` lists, by ratio, the raw rows that do not run in the step."""
    tables = {}
    for kind in dict.fromkeys(geometry.attention_kinds):
        ratio = {
            AttentionKind.SLIDING: 0,
            AttentionKind.CSA: geometry.csa_ratio,
            AttentionKind.HCA: geometry.hca_ratio,
        }[kind]
        attention = attention_table(sequences, rows, ratio, device)
        empty = torch.empty(0, dtype=torch.int64, device=device)
        if ratio == 0:
            tables[ratio] = RatioTables(attention=attention, compress=None, tail_targets=empty, tail_sources=empty)
            continue
        known = extras.get(ratio, ())
        targets, sources = _tail_rows(sequences, rows, tail_rows(kind, ratio), known)
        tables[ratio] = RatioTables(
            attention=attention,
            compress=compress_table(sequences, rows, ratio, kind is AttentionKind.CSA, known, device),
            tail_targets=torch.from_numpy(targets).to(device),
            tail_sources=torch.from_numpy(sources).to(device),
        )
    return tables
