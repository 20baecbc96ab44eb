"""Tables of a step: no row sees the future, entries are refreshed exactly when every row they pool is there."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.request.test_controller import segment_tables
from trt_redknot.config.geometry import AttentionKind
from trt_redknot.engine.pool import SequenceState
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.tables import ExtraRow, ratio_arrays
from trt_redknot.request.segments import Segment, SegmentKind
from trt_redknot.request.visibility import visible_entries

KINDS = st.sampled_from([(AttentionKind.CSA, 4), (AttentionKind.HCA, 16)])


def entry_spans(segments: tuple[Segment, ...], ratio: int) -> list[tuple[Segment, int, int]]:
    """(segment, first row, last row) of every entry of a sequence, in order."""
    return [
        (segment, segment.start + w * ratio, min(segment.start + (w + 1) * ratio, segment.stop) - 1)
        for segment in segments
        for w in range(segment.entries(ratio))
    ]


def written(
    layers: tuple[AttentionKind, int], state: SequenceState, rows: RowSet, extras: Sequence[ExtraRow]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Entries, slots and positions of a step's compress table."""
    table = ratio_arrays(*layers, [state], rows, extras)
    assert table.entries is not None
    assert table.slots is not None
    assert table.positions is not None
    return table.entries, table.slots, table.positions


@given(segment_tables(), st.sampled_from([4, 16, 128]))
def test_visible_entries_are_exactly_the_finished_ones(segments: tuple[Segment, ...], ratio: int) -> None:
    spans = entry_spans(segments, ratio)
    positions = np.arange(segments[-1].stop)
    visible = visible_entries(segments, positions, ratio)
    for position in random.sample(range(len(positions)), min(40, len(positions))):
        finished = [last <= position for _, _, last in spans]
        partial = [last - first + 1 < ratio for _, first, last in spans]
        seen = [
            done and (not short or position >= segment.stop)
            for done, short, (segment, _, _) in zip(finished, partial, spans, strict=True)
        ]
        assert visible[position] == sum(seen)
        # A count is enough only because what is visible is always a beginning of the entries.
        assert seen == sorted(seen, reverse=True)
        assert all(last <= position for (_, _, last), is_seen in zip(spans, seen, strict=True) if is_seen)


@settings(max_examples=60, deadline=None)
@given(segment_tables(), KINDS, st.floats(0, 1), st.integers(0, 2**31))
def test_entries_are_written_when_every_row_is_there(
    segments: tuple[Segment, ...], layers: tuple[AttentionKind, int], share: float, seed: int
) -> None:
    kind, ratio = layers
    overlap = kind is AttentionKind.CSA
    draw = random.Random(seed)
    total = segments[-1].stop
    live = np.zeros(total, dtype=bool)
    for segment in segments:
        for start in range(segment.start, segment.stop, 4):
            if segment.kind is SegmentKind.FRESH or draw.random() < share:
                live[start : min(start + 4, segment.stop)] = True
    extras = [
        ExtraRow(sequence=0, position=row, exact=segment.kind is SegmentKind.PREFIX)
        for segment in segments
        if segment.is_document
        for row in range(max(segment.start, segment.stop - 4), segment.stop)
        if not live[row]
    ]
    positions = np.flatnonzero(live)
    if not len(positions):
        return
    rows = RowSet(
        sequences=np.zeros(len(positions), dtype=np.int64), positions=positions, full_rows=len(positions), rank=0,
        size=1, chunk_rows=64,
    )  # fmt: skip
    state = SequenceState(slot=0, latent_offset=0, entry_offsets={ratio: 7}, segments=list(segments))
    entries, slots, first_rows = written(layers, state, rows, extras)
    raw_positions = [extra.position for extra in extras] + positions.tolist()
    slots_of = dict(zip(entries.tolist(), slots.tolist(), strict=True))
    exact = {extra.position for extra in extras if extra.exact}
    known = {extra.position for extra in extras}
    for index, (segment, first, last) in enumerate(entry_spans(segments, ratio)):
        own = list(range(first, last + 1))
        before = list(range(max(0, first - ratio), first)) if overlap else []
        runs = any(live[row] for row in own)
        if segment.kind is SegmentKind.FRESH:
            there = all(live[row] or row in known for row in before)
        else:
            there = all(live[row] or row in exact for row in own + before)
        assert (7 + index in slots_of) == (runs and there)
        if 7 + index in slots_of:
            pooled = [raw_positions[slot] for slot in slots_of[7 + index] if slot >= 0]
            assert pooled == before + own
    begins = dict(zip(entries.tolist(), first_rows.tolist(), strict=True))
    for index, (_, first, _) in enumerate(entry_spans(segments, ratio)):
        if 7 + index in begins:
            assert begins[7 + index] == first


@settings(max_examples=80, deadline=None)
@given(segment_tables(), KINDS, st.integers(1, 40), st.integers(0, 2**31))
def test_late_rows_write_what_they_write_in_a_table_of_all_positions(
    segments: tuple[Segment, ...], layers: tuple[AttentionKind, int], late: int, seed: int
) -> None:
    """A decode step's tables look at the last rows only; an extra row at position 0 makes them look at all."""
    _, ratio = layers
    draw = random.Random(seed)
    total = segments[-1].stop
    positions = np.array(
        sorted(draw.sample(range(max(0, total - late), total), draw.randrange(1, min(late, total) + 1)))
    )
    known = range(max(1, int(positions[0]) - 2 * ratio), int(positions[0]))
    extras = [ExtraRow(sequence=0, position=row, exact=draw.random() < 0.7) for row in known]
    rows = RowSet(
        sequences=np.zeros(len(positions), dtype=np.int64), positions=positions, full_rows=len(positions), rank=0,
        size=1, chunk_rows=64,
    )  # fmt: skip
    if positions[0] <= 3 * ratio:
        return
    state = SequenceState(slot=0, latent_offset=0, entry_offsets={ratio: 7}, segments=list(segments))
    late_entries, late_slots, late_positions = written(layers, state, rows, extras)
    everything = [*extras, ExtraRow(sequence=0, position=0, exact=False)]
    entries, slots, first_rows = written(layers, state, rows, everything)
    assert np.array_equal(entries, late_entries)
    assert np.array_equal(first_rows, late_positions)
    assert np.array_equal(slots, late_slots + (late_slots >= len(extras)))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_row_sets_cover_every_row_once(size: int) -> None:
    rows, chunk = random.randrange(1, 200), random.randrange(1, 64)
    sets = [
        RowSet(
            sequences=np.zeros(rows, dtype=np.int64), positions=np.arange(rows), full_rows=random.randrange(rows + 1),
            rank=rank, size=size, chunk_rows=chunk,
        )
        for rank in range(size)
    ]  # fmt: skip
    owned = np.concatenate([each.own_rows for each in sets])
    assert sorted(owned.tolist()) == list(range(rows))
    for each in sets:
        assert sum(each.full_in(piece) for piece in each.chunks) == each.full_rows
        for piece in each.chunks:
            inside = each.own_rows[piece.own]
            assert inside.tolist() == list(range(piece.own_rows.start, piece.own_rows.stop))
            assert max(piece.counts) - min(piece.counts) <= 1
