"""`index_salience` without looks at the host, beside the reference: the same sums, on a CPU as on a GPU."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import Layout, make_table, place, random_rope
from trt_redknot.ops.cuda.indexer import index_salience
from trt_redknot.ops.reference import indexer
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows
from trt_redknot.ops.tables import AttentionTable

SEQUENCES = st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3)


def scene(sequences: tuple[tuple[int, ...], ...], of: int, seed: int) -> tuple[AttentionTable, int, int]:
    """Some rows of one sequence, entries of the pool, entries of the sequence."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(sequences=sequences, ratio=4, gap=int(torch.randint(0, 4, (), generator=generator)))
    pools = place(layout)
    rows = torch.randperm(sum(sequences[of]), generator=generator)[:23]
    table = make_table(layout, pools, [(of, rows)])
    first = int(table.row_segments[0, 0]) if len(rows) else 0
    last = int(table.row_segments[0, 1]) if len(rows) else 0
    return table, pools.owned_entries.shape[0], int(table.segments[first:last, -1].sum())


@settings(deadline=None, max_examples=60)
@given(SEQUENCES.map(tuple), st.integers(0, 2), st.integers(0, 2**31), st.booleans())
def test_sums_are_those_of_the_reference(
    sequences: tuple[tuple[int, ...], ...], of: int, seed: int, packed: bool
) -> None:
    table, pool, entries = scene(sequences, of % len(sequences), seed)
    generator = torch.Generator().manual_seed(seed)
    rows, heads, dim = len(table.positions), 8, 128
    query = torch.randn(rows, heads, dim, generator=generator)
    weights = torch.randn(rows, heads, generator=generator)
    keys = torch.randn(pool, dim, generator=generator)
    rope = random_rope(2048, 64)
    stored = pack_rows(keys) if packed else keys
    numbers = unpack_rows(stored, dim, torch.float32) if packed else keys
    total, seen = index_salience(query, weights, stored, table, rope, entries=entries)
    expected, expected_seen = indexer.index_salience(query, weights, numbers, table, rope, entries=entries)
    torch.testing.assert_close(total, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(seen, expected_seen)
