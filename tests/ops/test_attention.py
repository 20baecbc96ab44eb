"""seg_latent_attention against an oracle that re-rotates the whole cache and takes one softmax, in fp64."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tables import Case, random_case
from trt_redknot.ops.reference.attention import Partial, finish, merge_partials, partial_attention, seg_latent_attention
from trt_redknot.ops.reference.indexer import index_salience, lightning_indexer
from trt_redknot.ops.reference.numerics import rope_table, rotate

DIM, ROPE = 24, 8


def rope(positions: int) -> torch.Tensor:
    frequencies = 1.0 / (100.0 ** (torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE))
    return rope_table(frequencies, positions, factor=1.0, dtype=torch.float64)


def keys_of_row(
    case: Case, row: int, latents: torch.Tensor, entries: torch.Tensor | None, selected: torch.Tensor | None,
    window: int, ratio: int, table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """All keys of one row, rotated to their positions in the request: the cache rewritten for this request."""
    first, last = case.table.row_segments[row].tolist()
    position = int(case.table.positions[row])
    keys = []
    entry_index = 0
    for start, stop, latent, entry, count in case.table.segments[first:last].tolist():
        for token in range(start, stop):
            if position - window < token <= position:
                keys.append(rotate(latents[latent + token - start][None], table, torch.tensor([start]))[0])
        for offset in range(count):
            seen = entry_index + offset < int(case.table.visible[row])
            if seen and entries is not None and (selected is None or (entry + offset) in selected[row].tolist()):
                keys.append(rotate(entries[entry + offset][None], table, torch.tensor([start]))[0])
        entry_index += count
    return torch.stack(keys)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 12),
    sequences=st.integers(1, 3),
    window=st.integers(1, 30),
    ratio=st.sampled_from([0, 4, 16]),
    groups=st.integers(1, 2),
    local=st.integers(0, 3),
    sparse=st.booleans(),
)
def test_equals_one_softmax_over_a_rotated_cache(
    seed: int, rows: int, sequences: int, window: int, ratio: int, groups: int, local: int, sparse: bool
) -> None:
    case = random_case(seed, rows=rows, sequences=sequences, longest=40, ratio=ratio, window=window)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    full = random.Random(seed).randint(0, rows)
    latents = normal(case.latents, DIM)
    entries = normal(case.entries, DIM) if ratio else None
    selected = None
    if ratio and sparse:
        choice = [
            random.Random(seed + row).sample(range(-1, case.entries), min(5, case.entries)) for row in range(rows)
        ]
        selected = torch.tensor(choice)
    q_global, q_local = normal(rows, groups, DIM), normal(full, groups * local, DIM)
    sinks_global, sinks_local = normal(groups), normal(groups * local)
    table = rope(case.positions)
    out_global, out_local = seg_latent_attention(
        q_global, q_local, case.table, latents, entries, selected, sinks_global, sinks_local, table, window=window
    )
    assert out_local.shape == (full, groups * local, DIM)
    for row in range(rows):
        keys = keys_of_row(case, row, latents, entries, selected, window, ratio, table)
        position = case.table.positions[row : row + 1]
        heads, outputs, sinks = [q_global[row]], [out_global[row]], [sinks_global]
        if row < full:
            heads, outputs, sinks = [*heads, q_local[row]], [*outputs, out_local[row]], [*sinks, sinks_local]
        q = rotate(torch.cat(heads)[None], table, position)[0]
        scores = torch.cat([q @ keys.T * DIM**-0.5, torch.cat(sinks)[:, None]], dim=1)
        expected = scores.softmax(1)[:, :-1] @ keys
        expected = rotate(expected[None], table, position, inverse=True)[0]
        torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-9, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), parts=st.integers(2, 6))
def test_merged_partials_are_one_softmax(seed: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 2, DIM, generator=generator, dtype=torch.float64) * 4
    sinks = torch.randn(2, generator=generator, dtype=torch.float64)
    keys = [torch.randn(5, DIM, generator=generator, dtype=torch.float64) for _ in range(parts)]
    seen = [torch.rand(3, 5, generator=generator) < 0.5 for _ in range(parts)]
    seen[0][:, 0] = True
    merged: Partial | None = None
    for some, mask in zip(keys, seen, strict=True):
        part = partial_attention(q, some, mask)
        merged = part if merged is None else merge_partials(merged, part)
    assert merged is not None
    whole = finish(partial_attention(q, torch.cat(keys), torch.cat(seen, dim=1)), sinks)
    torch.testing.assert_close(finish(merged, sinks), whole, atol=1e-12, rtol=1e-12)
    # A sink that were added once per segment would give another denominator.
    twice = finish(merged, sinks + torch.log(torch.tensor(float(parts))))
    assert (twice - whole).abs().max() > 1e-6


@pytest.mark.parametrize("offset", [0, 1, 128, 5000])
def test_a_relocated_query_equals_a_rotated_cache(offset: int) -> None:
    """<R(D + p) q, R(D + j) k> = <R(p) q, R(j) k>, for any D."""
    table = rope(6000)
    q, k = torch.randn(2, 1, DIM, dtype=torch.float64), torch.randn(2, 1, DIM, dtype=torch.float64)
    p, j = torch.tensor([500, 900]), torch.tensor([3, 870])
    moved = (rotate(q, table, p + offset) * rotate(k, table, j + offset)).sum(-1)
    still = (rotate(q, table, p) * rotate(k, table, j)).sum(-1)
    torch.testing.assert_close(moved, still, atol=1e-10, rtol=0)


def test_invisible_keys_may_hold_anything() -> None:
    """Everything a row may not see is NaN; the result is finite."""
    seed = random.randrange(2**31)
    case = random_case(seed, rows=1, sequences=1, longest=60, ratio=4, window=8)
    table = rope(case.positions)
    latents = torch.full((case.latents, DIM), float("nan"), dtype=torch.float64)
    entries = torch.full((case.entries, DIM), float("nan"), dtype=torch.float64)
    position, seen = int(case.table.positions[0]), int(case.table.visible[0])
    base = int(case.table.segments[0, 3])
    entries[base : base + seen] = torch.randn(seen, DIM, dtype=torch.float64)
    for start, stop, latent, _, _ in case.table.segments.tolist():
        for token in range(max(start, position - 7), min(stop, position + 1)):
            latents[latent + token - start] = torch.randn(DIM, dtype=torch.float64)
    out, _ = seg_latent_attention(
        torch.randn(1, 2, DIM, dtype=torch.float64), torch.zeros(0, 0, DIM, dtype=torch.float64), case.table, latents,
        entries, None, torch.zeros(2), torch.zeros(0), table, window=8,
    )  # fmt: skip
    assert out.isfinite().all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 10), sequences=st.integers(1, 3), top_k=st.integers(1, 12))
def test_indexer_takes_the_best_visible_entries(seed: int, rows: int, sequences: int, top_k: int) -> None:
    case = random_case(seed, rows=rows, sequences=sequences, longest=40, ratio=4, window=1)
    generator = torch.Generator().manual_seed(seed)
    heads = 3
    # Few distinct keys: ties are the rule, and they must fall to the earlier entry. Integers make equal scores exactly
    # so.
    q = torch.randint(-4, 5, (rows, heads, DIM), generator=generator).double()
    distinct = torch.randint(-4, 5, (4, DIM), generator=generator).double()
    keys = distinct[torch.randint(0, 4, (case.entries,), generator=generator)]
    weights = torch.randn(rows, heads, generator=generator, dtype=torch.float64)
    table = torch.zeros(case.positions, ROPE // 2, 2, dtype=torch.float64)
    table[..., 0] = 1.0
    selected = lightning_indexer(q, weights, keys, case.table, table, top_k=top_k)
    for row in range(rows):
        first = int(case.table.segments[int(case.table.row_segments[row, 0]), 3])
        seen = int(case.table.visible[row])
        scores = (torch.relu(q[row] @ keys[first : first + seen].T) * DIM**-0.5 * weights[row][:, None]).sum(0)
        best = sorted(range(seen), key=lambda e: (-round(float(scores[e] * heads**-0.5), 9), e))[:top_k]
        chosen = [int(entry) for entry in selected[row] if entry >= 0]
        assert len(chosen) == min(top_k, seen)
        torch.testing.assert_close(scores[[entry - first for entry in chosen]], scores[best], atol=1e-9, rtol=0)
        for earlier, later in pairwise(chosen):
            if keys[earlier].equal(keys[later]):
                assert earlier < later
        assert (selected[row, len(chosen) :] == -1).all()


def test_salience_sums_what_rows_see() -> None:
    seed = random.randrange(2**31)
    case = random_case(seed, rows=9, sequences=1, longest=50, ratio=4, window=1)
    entries = int(case.table.segments[:, -1].sum())
    q, weights = torch.randn(9, 2, DIM, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    keys, table = torch.randn(case.entries, DIM, dtype=torch.float64), rope(case.positions)
    total, seen = index_salience(q, weights, keys, case.table, table, entries=entries)
    by_row = [
        index_salience(
            q[row : row + 1], weights[row : row + 1], keys, case.table.rows(slice(row, row + 1)), table, entries=entries
        )
        for row in range(9)
    ]
    torch.testing.assert_close(total, torch.stack([t for t, _ in by_row]).sum(0))
    for row, (_, mask) in enumerate(by_row):
        assert mask.sum() == case.table.visible[row]
    assert torch.equal(seen, torch.stack([s for _, s in by_row]).sum(0))
