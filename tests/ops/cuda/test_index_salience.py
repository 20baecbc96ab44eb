"""`index_salience` on the GPU: exact sums of exact inputs, fp64 on random ones, in one round or several."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benches.common import Layout, make_table, place, random_rope, table_to
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.indexer import index_salience
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.reference import indexer
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows
from trt_redknot.ops.tables import AttentionTable

SEQUENCES = st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3)
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


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


def summed(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: AttentionTable, rope: torch.Tensor, entries: int,
    rows_at_a_time: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The kernel with few rows a round, its outputs and workspace poisoned (with NaN) before the launch."""
    load_kernels()
    total = torch.full((entries,), torch.nan, device="cuda")
    seen = torch.full((entries,), torch.nan, device="cuda")
    size = torch.ops.redknot.lightning_indexer_workspace(keys.shape[0], rows_at_a_time)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    on_gpu = table_to(table, "cuda")
    torch.ops.redknot.index_salience(
        total, seen, workspace, q, weights, keys, on_gpu.segments, on_gpu.row_segments, on_gpu.positions,
        on_gpu.visible, rope, keys.dtype is torch.uint8,
    )  # fmt: skip
    return total, seen


@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
@TYPICAL
@given(sequences=SEQUENCES.map(tuple), of=st.integers(0, 2), seed=SEEDS, rounds=st.sampled_from([4, 8, 64]))
def test_whole_numbers_add_up_exactly(
    packed: bool, sequences: tuple[tuple[int, ...], ...], of: int, seed: int, rounds: int
) -> None:
    table, pool, entries = scene(sequences, of % len(sequences), seed)
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows = table.positions.shape[0]

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device="cuda").bfloat16()

    q, weights, keys = whole(rows, 64, 128), whole(rows, 64), whole(pool, 128)
    still = torch.tensor([1.0, 0.0], device="cuda").expand(4, 32, 2).contiguous()
    total, seen = summed(q, weights, pack_rows(keys) if packed else keys, table, still, entries, rounds)
    first = int(table.segments[table.row_segments[0, 0], 3]) if rows else 0
    products = torch.relu(q.double() @ keys[first : first + entries].double().T)
    scores = (products * weights.double().unsqueeze(-1)).sum(1) * torch.tensor(64 * 128.0).rsqrt().double()
    sees = torch.arange(entries).unsqueeze(0) < table.visible.unsqueeze(1)
    torch.testing.assert_close(total.double(), (scores * sees.cuda()).sum(0), atol=1e-3, rtol=1e-5)
    assert torch.equal(seen.cpu(), sees.sum(0).float())


@needs_gpu
@pytest.mark.parametrize("packed", [False, True])
@TYPICAL
@given(sequences=SEQUENCES.map(tuple), of=st.integers(0, 2), seed=SEEDS)
def test_sums_are_those_of_the_reference(
    packed: bool, sequences: tuple[tuple[int, ...], ...], of: int, seed: int
) -> None:
    """Rotated rows; what differs is q rounded to bf16 after its rotation, or to e4m3, and sums in fp32."""
    table, pool, entries = scene(sequences, of % len(sequences), seed)
    generator = torch.Generator().manual_seed(seed)
    rows = table.positions.shape[0]
    q = torch.randn((rows, 64, 128), generator=generator).bfloat16()
    weights = torch.randn((rows, 64), generator=generator).bfloat16()
    keys = torch.randn((pool, 128), generator=generator).bfloat16()
    rope = random_rope(8192, 64)
    stored = pack_rows(keys) if packed else keys
    total, seen = index_salience(
        q.cuda(), weights.cuda(), stored.cuda(), table_to(table, "cuda"), rope.cuda(), entries=entries
    )  # fmt: skip
    plain = unpack_rows(stored, 128, torch.float64) if packed else keys.double()
    expected, expected_seen = indexer.index_salience(
        q.double(), weights.double(), plain, table, rope.double(), entries=entries
    )  # fmt: skip
    assert torch.equal(seen.cpu().double(), expected_seen)
    # A row's score is about 1; its 64 products are off by 2^-9 (bf16) or 2^-4 (e4m3) of theirs, with either sign.
    slack = (0.12 if packed else 0.01) * expected_seen.sqrt().clamp(min=1)
    assert ((total.cpu().double() - expected).abs() <= slack).all()


@needs_gpu
@pytest.mark.parametrize("rows", [0, 5])
def test_no_rows_or_no_entries_add_nothing(rows: int) -> None:
    layout = Layout(sequences=((40,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.arange(rows))]), "cuda")
    q = torch.randn((rows, 64, 128), device="cuda").bfloat16()
    keys = torch.randn((10, 128), device="cuda").bfloat16()
    total, seen = index_salience(q, q[:, :, 0].contiguous(), keys, table, random_rope(40, 64).cuda(), entries=10)
    assert total.shape == seen.shape == (10,)
    assert bool(torch.isfinite(total).all())
    assert float(seen.sum()) == float(table.visible.sum())
    total, seen = index_salience(q, q[:, :, 0].contiguous(), keys[:0], table, random_rope(40, 64).cuda(), entries=0)
    assert total.shape == seen.shape == (0,)


@needs_gpu
def test_more_entries_than_the_pool_has_are_refused() -> None:
    layout = Layout(sequences=((40,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.arange(4))]), "cuda")
    q = torch.randn((4, 64, 128), device="cuda").bfloat16()
    keys = torch.randn((10, 128), device="cuda").bfloat16()
    with pytest.raises(EngineError, match="refused"):
        index_salience(q, q[:, :, 0].contiguous(), keys, table, random_rope(40, 64).cuda(), entries=11)
