"""The entries that random rows select: what attention requires of them, in both ways of drawing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import Layout, make_table, place, random_selection


@pytest.mark.parametrize("tokens", [300, 2500])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**31), gap=st.integers(0, 5))
def test_selected_entries_are_distinct_and_visible(tokens: int, seed: int, gap: int) -> None:
    top_k, layout = 64, Layout(sequences=((tokens,), (tokens,)), ratio=4, gap=gap)
    pools = place(layout)
    positions = torch.arange(tokens - 40, tokens)
    table = make_table(layout, pools, [(0, positions), (1, positions)])
    chosen = random_selection(table, top_k, torch.Generator().manual_seed(seed))
    first = pools.segments[table.row_segments[:, 0], 3].tolist()
    for entries, start, visible in zip(chosen.tolist(), first, table.visible.tolist(), strict=True):
        assert len(set(entries)) == top_k
        assert all(start <= entry < start + visible for entry in entries)
