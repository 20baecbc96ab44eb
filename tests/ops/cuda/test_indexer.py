"""lightning_indexer on the GPU: exact selections on exact inputs (ties included), the fp64 reference on random ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benches.common import Layout, make_table, place, random_rope, table_to
from tests.support.gpu import needs_gpu, needs_kernels
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.indexer import lightning_indexer
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.reference.numerics import rotate
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows
from trt_redknot.ops.tables import AttentionTable

SEEDS = st.integers(0, 2**31)
LENGTHS = st.one_of(st.integers(0, 9), st.integers(1, 300), st.integers(300, 3000))
SEQUENCES = st.lists(st.lists(LENGTHS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=3).map(tuple)
TOP_K = st.sampled_from([1, 5, 64, 512, 1024])
TYPICAL = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])


def random_table(sequences: tuple[tuple[int, ...], ...], seed: int, most: int) -> tuple[AttentionTable, int]:
    """Rows of every sequence in random order, and the rows of the key pool."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(sequences=sequences, ratio=4, gap=int(torch.randint(0, 4, (), generator=generator)))
    pools = place(layout)
    rows = [
        (index, torch.randperm(sum(lengths), generator=generator)[:most])
        for index, lengths in enumerate(sequences)
        if sum(lengths)
    ] or [(0, torch.zeros(0, dtype=torch.int64))]
    return table_to(make_table(layout, pools, rows), "cuda"), pools.owned_entries.shape[0]


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: AttentionTable,
    rope: torch.Tensor,
    top_k: int,
    fp8: bool,
    rows_at_a_time: int = 8,
) -> torch.Tensor:
    """The kernel with few rows a round, its output and workspace poisoned before the launch."""
    load_kernels()
    selected = torch.full((q.shape[0], top_k), -77, dtype=torch.int64, device="cuda")
    size = torch.ops.redknot.lightning_indexer_workspace(keys.shape[0], rows_at_a_time)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    torch.ops.redknot.lightning_indexer(
        selected, workspace, q, weights, keys, table.segments, table.row_segments, table.positions, table.visible, rope,
        fp8,
    )  # fmt: skip
    return selected


def row_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: AttentionTable,
    rope: torch.Tensor,
    row: int,
    fp8: bool,
) -> tuple[torch.Tensor, int]:
    """fp64 scores of one row over the entries of its sequence, -inf where invisible, and the first entry's pool row.

    With `fp8`, q is rounded to e4m3 after its rotation, as the kernel does: what is left to differ is summation.
    """
    first, last = table.row_segments[row].tolist()
    parts = []
    for start, _, offset, count, _ in table.segments[first:last, [0, 1, 3, 4, 2]].tolist():
        frame = (table.positions[row : row + 1] - start).clamp(min=0)
        turned = rotate(q[row : row + 1].float(), rope, frame)[0]
        if fp8:
            turned = unpack_rows(pack_rows(turned), 128, torch.float32)
        products = torch.relu(turned.double() @ keys[offset : offset + count].double().T)
        parts.append(weights[row].double() @ products / (64 * 128) ** 0.5)
    scores = torch.cat(parts)
    scores[int(table.visible[row]) :] = -torch.inf
    return scores, int(table.segments[first, 3])


@needs_gpu
@pytest.mark.parametrize("form", ["bf16", "fp8 of bf16", "fp8 packed"])
@TYPICAL
@given(sequences=SEQUENCES, seed=SEEDS, top_k=TOP_K, levels=st.sampled_from([1, 3]))
def test_exact_inputs_select_exactly(
    form: str, sequences: tuple[tuple[int, ...], ...], seed: int, top_k: int, levels: int
) -> None:
    """Small integers and no rotation: every score is exact, many are equal, and the earlier entry must win."""
    table, entries = random_table(sequences, seed, most=20)
    rows = table.positions.shape[0]
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-levels, levels + 1, shape, generator=generator, device="cuda").bfloat16()

    q, weights, keys = whole(rows, 64, 128), whole(rows, 64), whole(entries, 128)
    keys[::7] = 0
    still = torch.tensor([1.0, 0.0], device="cuda").expand(4, 32, 2).contiguous()
    stored = pack_rows(keys) if form == "fp8 packed" else keys
    found = select(q, weights, stored, table, still, top_k, fp8=form != "bf16")
    for row in range(rows):
        first, last = table.row_segments[row].tolist()
        begin = int(table.segments[first, 3])
        end = int(table.segments[last - 1, 3] + table.segments[last - 1, 4])
        seen = min(end - begin, int(table.visible[row]))
        products = torch.relu(q[row].double() @ keys[begin : begin + seen].double().T)
        scores = weights[row].double() @ products
        order = scores.sort(descending=True, stable=True).indices[:top_k] + begin
        wanted = torch.full((top_k,), -1, dtype=torch.int64, device="cuda")
        wanted[: order.shape[0]] = order
        assert torch.equal(found[row], wanted), row


@needs_gpu
@pytest.mark.parametrize("form", ["bf16", "fp8 packed"])
@TYPICAL
@given(sequences=SEQUENCES, seed=SEEDS, top_k=TOP_K)
def test_random_inputs_select_the_best(
    form: str, sequences: tuple[tuple[int, ...], ...], seed: int, top_k: int
) -> None:
    """What is chosen scores, in fp64, at least as much as what is not, up to the rounding of sums."""
    table, entries = random_table(sequences, seed, most=8)
    rows = table.positions.shape[0]
    generator = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn((rows, 64, 128), generator=generator, device="cuda").bfloat16()
    weights = torch.randn((rows, 64), generator=generator, device="cuda").bfloat16()
    keys = torch.randn((entries, 128), generator=generator, device="cuda").bfloat16()
    rope = random_rope(max(1, max(map(sum, sequences))), 64).cuda()
    stored = pack_rows(keys) if form == "fp8 packed" else keys
    plain = unpack_rows(stored, 128, torch.float32) if form == "fp8 packed" else keys
    found = select(q, weights, stored, table, rope, top_k, fp8=form != "bf16")
    for row in range(rows):
        scores, first = row_scores(q, weights, plain, table, rope, row, fp8=form != "bf16")
        seen = int((~scores.isinf()).sum())
        chosen = found[row][found[row] >= 0] - first
        assert chosen.shape[0] == min(seen, top_k)
        assert (found[row][chosen.shape[0] :] == -1).all()
        assert chosen.unique().shape[0] == chosen.shape[0]
        if chosen.shape[0] == 0:
            continue
        # Sums of the matrix units keep about 13 bits in fp8, and q is rounded to bf16 in the other form.
        slack = 4e-3 * float(scores[~scores.isinf()].std(unbiased=False) + 0.1)
        values = scores[chosen]
        assert (values[:-1] - values[1:] > -2 * slack).all()
        rest = scores.clone()
        rest[chosen] = -torch.inf
        assert float(rest.max()) <= float(values.min()) + 2 * slack


@needs_gpu
@pytest.mark.parametrize("equal", [True, False])
def test_many_entries_take_several_passes(equal: bool) -> None:
    """More equal scores than the sorted candidates hold: the earliest entries win."""
    layout = Layout(sequences=((80000,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.tensor([79999, 70001, 500]))]), "cuda")
    q = torch.ones((3, 64, 128), device="cuda", dtype=torch.bfloat16)
    keys = torch.ones((20000, 128), device="cuda", dtype=torch.bfloat16)
    if not equal:
        keys[10000:] = 2.0
    still = torch.tensor([1.0, 0.0], device="cuda").expand(1, 32, 2).contiguous()
    found = select(q, q[:, :, 0].contiguous(), keys, table, still, 1024, fp8=True, rows_at_a_time=4)
    first = 0 if equal else 10000
    assert torch.equal(found[0], torch.arange(first, first + 1024, device="cuda"))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2, :125], torch.arange(125, device="cuda"))
    assert (found[2, 125:] == -1).all()


@needs_gpu
@pytest.mark.parametrize("favoured", ["none", "sampled", "not sampled"])
@pytest.mark.parametrize("top_k", [1, 512, 1024])
def test_a_misleading_sample_costs_time_only(favoured: str, top_k: int) -> None:
    """Scores of 20000 entries, of which those that the kernel samples are the best, or the worst."""
    entries = 20000
    layout = Layout(sequences=((4 * entries,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.tensor([4 * entries - 1, 60001]))]), "cuda")
    generator = torch.Generator(device="cuda").manual_seed(top_k)
    q = torch.zeros((2, 64, 128), device="cuda", dtype=torch.bfloat16)
    q[:, 0, :2] = 1
    weights = torch.ones((2, 64), device="cuda", dtype=torch.bfloat16)
    # Exact scores of whole numbers: 0 to 15 from one channel, a favour of 64 from the other.
    keys = torch.zeros((entries, 128), device="cuda", dtype=torch.bfloat16)
    keys[:, 0] = torch.randint(0, 16, (entries,), generator=generator, device="cuda").bfloat16()
    sampled = torch.arange(entries, device="cuda") % (entries // 1024) < 4
    if favoured != "none":
        keys[sampled if favoured == "sampled" else ~sampled, 1] = 64
    still = torch.tensor([1.0, 0.0], device="cuda").expand(1, 32, 2).contiguous()
    found = select(q, weights, keys, table, still, top_k, fp8=True)
    for row in range(2):
        scores = keys[: int(table.visible[row]), :2].float().sum(1)
        assert torch.equal(found[row], scores.sort(descending=True, stable=True).indices[:top_k])


@needs_gpu
def test_no_entries_select_nothing() -> None:
    layout = Layout(sequences=((40,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.arange(40))]), "cuda")
    q = torch.randn((40, 64, 128), device="cuda").bfloat16()
    empty = torch.zeros((0, 128), device="cuda", dtype=torch.bfloat16)
    found = lightning_indexer(q, q[:, :, 0].contiguous(), empty, table, random_rope(40, 64).cuda(), top_k=8)
    assert (found == -1).all()


@needs_gpu
@pytest.mark.parametrize("wrong", ["dtype", "heads", "top_k", "bf16 scores of packed keys"])
def test_bad_inputs_are_refused(wrong: str) -> None:
    layout = Layout(sequences=((40,),), ratio=4)
    table = table_to(make_table(layout, place(layout), [(0, torch.arange(4))]), "cuda")
    q = torch.randn((4, 64, 128), device="cuda").bfloat16()
    weights, keys = q[:, :, 0].contiguous(), torch.randn((10, 128), device="cuda").bfloat16()
    top_k, fp8 = 8, True
    if wrong == "dtype":
        q = q.float()
    elif wrong == "heads":
        q, weights = q[:, :32].contiguous(), weights[:, :32].contiguous()
    elif wrong == "top_k":
        top_k = 2048
    else:
        keys, fp8 = pack_rows(keys), False
    with pytest.raises(EngineError, match="refused"):
        lightning_indexer(q, weights, keys, table, random_rope(40, 64).cuda(), top_k=top_k, fp8=fp8)


@needs_kernels
def test_workspace_grows_with_rows_without_a_gpu() -> None:
    load_kernels()
    few, many = (torch.ops.redknot.lightning_indexer_workspace(1000, rows) for rows in (4, 400))
    assert many - few >= 396 * 4000 - 256
    assert few >= 4 * 4000 + 1000 * 132


# Segments that break the contract: the sequence's first segment begins after another's entries, or before the pool.
BROKEN = {
    "the first segment's entries come last": ([[0, 512, 0, 128, 128], [512, 1024, 512, 0, 128]], 256),
    "the first entry lies before the pool": ([[0, 1600, 0, -200, 400]], 400),
}


@needs_gpu
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_table_that_breaks_its_contract_moves_no_write_outside_the_scores(broken: str, fp8: bool) -> None:
    load_kernels()
    rows, entries, top_k, guard = 4, 256, 64, 4096
    segments, visible = BROKEN[broken]
    generator = torch.Generator(device="cuda").manual_seed(3)
    q = torch.randn((rows, 64, 128), generator=generator, device="cuda").bfloat16()
    weights = torch.randn((rows, 64), generator=generator, device="cuda").bfloat16()
    keys = torch.randn((entries, 128), generator=generator, device="cuda").bfloat16()
    size = torch.ops.redknot.lightning_indexer_workspace(entries, rows)
    scores = 4 * entries * rows
    before = size - scores - 256  # keys and their scales; 256 bytes are there to align
    memory = torch.full((guard + size + guard,), 0xFF, dtype=torch.uint8, device="cuda")
    selected = torch.full((rows, top_k), -77, dtype=torch.int64, device="cuda")
    torch.ops.redknot.lightning_indexer(
        selected, memory[guard : guard + size], q, weights, keys, torch.tensor(segments, device="cuda"),
        torch.tensor([[0, len(segments)]] * rows, device="cuda"), torch.full((rows,), 900, device="cuda"),
        torch.full((rows,), visible, device="cuda"), random_rope(1600, 64).cuda(), fp8,
    )  # fmt: skip
    untouched = guard if fp8 else guard + before
    assert (memory[:untouched] == 0xFF).all()
    assert (memory[guard + before + scores :] == 0xFF).all()
    assert ((selected >= -1) & (selected < entries)).all()
