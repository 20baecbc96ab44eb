"""Row sets: every row in one chunk and with one owner; moving rows between row sets loses and mixes up none."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.artifacts.support import together
from trt_redknot.collectives import Collectives
from trt_redknot.engine.rowset import RowSet, redistribute


def row_set(positions: NDArray[np.int64], *, full: int, rank: int, size: int, chunk_rows: int) -> RowSet:
    return RowSet(
        sequences=np.zeros(len(positions), dtype=np.int64), positions=positions, full_rows=full, rank=rank, size=size,
        chunk_rows=chunk_rows,
    )  # fmt: skip


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 9), st.integers(1, 60))
def test_chunks_and_owners_cover_all_rows_once(rows: int, full: int, size: int, chunk_rows: int) -> None:
    ranks = [
        row_set(np.arange(rows) * 3, full=min(full, rows), rank=rank, size=size, chunk_rows=chunk_rows)
        for rank in range(size)
    ]
    owned = np.concatenate([each.own_rows for each in ranks])
    assert sorted(owned.tolist()) == list(range(rows))
    for rank, each in enumerate(ranks):
        assert each.rows == rows
        assert [row for chunk in each.chunks for row in range(rows)[chunk.rows]] == list(range(rows))
        assert np.array_equal(each.owners, ranks[0].owners)
        assert np.array_equal(np.flatnonzero(each.owners == rank), each.own_rows)
        assert sum(each.full_in(chunk) for chunk in each.chunks) == min(full, rows)
        stored = np.arange(len(each.own_rows))
        for chunk in each.chunks:
            counts = [np.count_nonzero(each.owners[chunk.rows] == owner) for owner in range(size)]
            assert list(chunk.counts) == counts
            assert max(counts) - min(counts) <= 1
            # A chunk's own rows are consecutive in the row set and in this rank's storage.
            assert each.own_rows[chunk.own].tolist() == list(range(rows)[chunk.own_rows])
            stored = stored[len(each.own_rows[chunk.own]) :]
        assert stored.size == 0


@given(st.integers(1, 100_000), st.integers(1, 9), st.integers(1, 40_000))
def test_chunks_are_few_and_balanced(rows: int, size: int, chunk_rows: int) -> None:
    # Few numbers: chunks are cut from counts alone.
    rows = min(rows, 300 * chunk_rows)
    chunks = row_set(np.arange(rows), full=0, rank=0, size=size, chunk_rows=chunk_rows).chunks
    sizes = [chunk.rows.stop - chunk.rows.start for chunk in chunks]
    assert max(sizes) <= chunk_rows
    assert len(sizes) == -(-rows // chunk_rows)
    # All but the last are equal, and the last is short by less than what makes ranks equal in all of them.
    assert len(set(sizes[:-1])) <= 1
    assert sizes[0] - sizes[-1] <= len(sizes) * size
    equal = math.ceil(rows / len(sizes))
    if math.ceil(equal / size) * size <= chunk_rows:
        assert all(len(set(chunk.counts)) == 1 for chunk in chunks[:-1])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 2, 3, 5, 8]))
def test_redistribution_brings_every_known_row_to_its_new_owner(seed: int, size: int) -> None:
    draw = random.Random(seed)
    length = draw.randrange(1, 80)

    def positions() -> NDArray[np.int64]:
        chosen = draw.sample(range(length), draw.randrange(length + 1))
        return np.array(chosen if draw.random() < 0.5 else sorted(chosen), dtype=np.int64)

    old, new = (row_set(positions(), full=0, rank=0, size=size, chunk_rows=draw.randrange(1, 40)) for _ in range(2))

    def work(ranks: Collectives) -> tuple[list[int], torch.Tensor]:
        source, target = replace(old, rank=ranks.rank), replace(new, rank=ranks.rank)
        # A row carries its position, so that it can be recognised; zero is no row's value.
        held = torch.from_numpy(source.positions[source.own_rows] + 1).double()
        moved = redistribute(ranks, held[:, None, None].expand(-1, 2, 3).contiguous(), source, target)
        return target.positions[target.own_rows].tolist(), moved

    there = set(old.positions.tolist())
    for result in together(size, work):
        assert not isinstance(result, BaseException), result
        wanted, moved = result
        assert moved.shape == (len(wanted), 2, 3)
        expected = torch.tensor([position + 1 if position in there else 0 for position in wanted], dtype=torch.float64)
        assert torch.equal(moved, expected[:, None, None].expand(-1, 2, 3))
