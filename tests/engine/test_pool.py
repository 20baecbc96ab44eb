"""The cache pool: places never overlap, what is given back can be taken again, and holds NaN."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.networks import NetworkOptions, network_config
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.parse import geometry_from_config
from trt_redknot.engine.pool import CachePool, PoolRows, SequenceState
from trt_redknot.engine.ranges import Ranges
from trt_redknot.request.segments import Segment, SegmentKind


@pytest.fixture(scope="module")
def geometry() -> ModelGeometry:
    return geometry_from_config(
        json.loads(network_config(NetworkOptions(kinds="schc", hca=8)).to_json_string()), source="test"
    )


@given(st.integers(1, 60), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_ranges_against_a_list_of_owners(rows: int, calls: list[tuple[bool, int]]) -> None:
    ranges, owners, taken = Ranges(rows), [None] * rows, []
    for number, (give, size) in enumerate(calls):
        if give and taken:
            start, count, owner = taken.pop(size % len(taken))
            assert owners[start : start + count] == [owner] * count
            owners[start : start + count] = [None] * count
            ranges.give(start, count)
        elif ranges.longest >= size:
            start = ranges.take(size)
            assert owners[start : start + size] == [None] * size
            first = next(at for at in range(rows) if owners[at : at + size] == [None] * size)
            assert start == first
            owners[start : start + size] = [number] * size  # type: ignore[list-item]
            taken.append((start, size, number))
        else:
            with pytest.raises(ValueError, match="no gap"):
                ranges.take(size)
        assert ranges.free == owners.count(None)
        runs = "".join("." if owner is None else "x" for owner in owners).split("x")
        assert ranges.longest == max(map(len, runs))


def test_rows_given_back_twice_are_noticed() -> None:
    ranges = Ranges(10)
    start = ranges.take(4)
    ranges.give(start, 4)
    with pytest.raises(AssertionError):
        ranges.give(start, 4)
    assert ranges.take(0) == 0
    ranges.give(0, 0)
    assert ranges.free == 10


def document(length: int) -> list[Segment]:
    return [Segment(index=0, kind=SegmentKind.PREFIX, start=0, length=length)]


def places(geometry: ModelGeometry, pool: CachePool, state: SequenceState, size: PoolRows) -> list[torch.Tensor]:
    """Views of everything a sequence may write."""
    views = []
    for layer in range(geometry.layers):
        views.append(pool.latents[layer][state.latent_offset :][: size.latents])
        ratio = geometry.ratio(layer)
        for table in (pool.entries[layer], pool.index_keys[layer]):
            if table is not None:
                views.append(table[state.entry_offsets[ratio] :][: size.entries[ratio]])
        for tail in pool.tails[layer]:
            keep = len(tail) // pool.capacity.sequences
            views.append(tail[state.slot * keep :][:keep])
    return views


def test_sequences_never_share_rows_and_leave_nan(geometry: ModelGeometry) -> None:
    sizes = [PoolRows.of_sequence(geometry, random.randrange(1, 40), random.randrange(1, 5)) for _ in range(40)]
    capacity = PoolRows(latents=90, entries={4: 60, 8: 50}, sequences=5)
    pool = CachePool(geometry, capacity, dtype=torch.float32, device=torch.device("cpu"))
    opened: dict[int, tuple[SequenceState, PoolRows]] = {}
    for number, size in enumerate(sizes):
        while not pool.has_room(size):
            victim = random.choice(list(opened))
            state, taken = opened.pop(victim)
            views = places(geometry, pool, state, taken)
            assert all(bool((view == victim).all()) for view in views)
            pool.close(state)
            assert all(bool(view.isnan().all()) for view in views)
            with pytest.raises(KeyError):
                pool.close(state)
        state = pool.open(size, document(size.latents))
        assert state.length == size.latents
        views = places(geometry, pool, state, size)
        assert all(bool(view.isnan().all()) for view in views), "rows of somebody else"
        for view in views:
            view.fill_(number)
        opened[number] = (state, size)
    for state, _ in opened.values():
        pool.close(state)
    assert pool.free == capacity
    tables = [*pool.latents, *pool.entries, *pool.index_keys, *(tail for tails in pool.tails for tail in tails)]
    assert all(bool(table.isnan().all()) for table in tables if table is not None)


def test_a_sequence_without_room_is_refused(geometry: ModelGeometry) -> None:
    size = PoolRows.of_sequence(geometry, 10, 1)
    pool = CachePool(geometry, PoolRows.sum([size, size]), dtype=torch.float32, device=torch.device("cpu"))
    assert pool.capacity == PoolRows(
        latents=20, entries={ratio: 2 * n for ratio, n in size.entries.items()}, sequences=2
    )
    first, _ = pool.open(size, document(10)), pool.open(size, document(10))
    assert not pool.has_room(size)
    with pytest.raises(ValueError, match="no room"):
        pool.open(size, document(10))
    pool.close(first)
    assert pool.has_room(size)
    larger = PoolRows.of_sequence(geometry, 21, 1)
    assert not larger.within(pool.capacity)
    assert size.within(pool.capacity)
