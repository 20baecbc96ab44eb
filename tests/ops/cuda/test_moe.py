"""Permutation and experts on the GPU against the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.bench_experts import permutation_error, product_error
from benches.elementwise_cases import ExpertCase, expert_case, generator_of, normal
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda import moe
from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.experts import QuantisedExperts, quantise_experts
from trt_redknot.ops.reference import moe as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)
# Products and the activation are rounded to bf16 between the stages, sums are fp32.
EXPERT_TOLERANCE = 1e-2
# A channel of the activation that is rounded to the other bf16 may get another code.
FP8_TOLERANCE = 2e-2


def some_experts(rows: int, held: int, dropped: float, seed: int, hidden: int = 64, width: int = 32) -> ExpertCase:
    return expert_case(
        rows, hidden, width, total=24, held=held, first=seed % 8, top_k=6, dropped=dropped, seed=seed, device="cuda"
    )


@needs_gpu
@TYPICAL
@given(
    rows=st.one_of(st.integers(0, 40), st.integers(600, 1500), st.just(100_000)),
    held=st.integers(1, 16),
    dropped=st.floats(0, 1),
    hidden=st.sampled_from([8, 64, 264, 2048, 2056, 4104]),
    seed=SEEDS,
)
def test_permutation_is_a_stable_sort_by_expert(rows: int, held: int, dropped: float, hidden: int, seed: int) -> None:
    case = some_experts(rows, held, dropped, seed, hidden=8 if rows > 1500 else hidden)
    assert permutation_error(case, held) == 0


@needs_gpu
def test_more_experts_than_threads_are_sorted() -> None:
    case = expert_case(5000, 8, 8, total=1024, held=1000, first=17, top_k=8, dropped=0.1, seed=9, device="cuda")
    assert permutation_error(case, 1000) == 0


def in_fp64(case: ExpertCase) -> torch.Tensor:
    """What the experts of a case give, [R, M]."""
    return reference.experts(
        case.x.double(), case.ids, case.weights.double(), case.gate_up.double(), case.down.double(), first=case.first,
        limit=1.0,
    )  # fmt: skip


@needs_gpu
@TYPICAL
@given(rows=st.integers(0, 200), held=st.integers(1, 16), dropped=st.sampled_from([0.0, 0.3, 1.0]), seed=SEEDS)
def test_experts_equal_the_reference_and_repeat_bit_for_bit(rows: int, held: int, dropped: float, seed: int) -> None:
    case = some_experts(rows, held, dropped, seed, hidden=256, width=128)
    arguments = (case.x, case.ids, case.weights, case.gate_up, case.down)
    found = moe.experts(*arguments, first=case.first, limit=1.0)
    wanted = in_fp64(case)
    assert found.isfinite().all()
    assert (found - wanted).norm() <= EXPERT_TOLERANCE * wanted.norm()
    assert torch.equal(found, moe.experts(*arguments, first=case.first, limit=1.0))


@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("hidden", "width"), [(8, 8), (264, 136), (4096, 2048), (7168, 3072)])
@pytest.mark.parametrize("dropped", [0.0, 0.5, 1.0])
def test_few_rows_equal_the_reference_and_repeat_bit_for_bit(
    rows: int, hidden: int, width: int, dropped: float
) -> None:
    case = some_experts(rows, 3, dropped, seed=int(torch.randint(2**31, ())), hidden=hidden, width=width)
    arguments = (case.x, case.ids, case.weights, case.gate_up, case.down)
    found = moe.few_rows(*arguments, first=case.first, limit=1.0)
    wanted = in_fp64(case)
    assert found.isfinite().all()
    assert (found - wanted).norm() <= EXPERT_TOLERANCE * wanted.norm()
    assert torch.equal(found, moe.few_rows(*arguments, first=case.first, limit=1.0))
    assert torch.equal(found, moe.experts(*arguments, first=case.first, limit=1.0))


@needs_gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("hidden", "width"), [(128, 128), (4096, 2048), (7168, 3072)])
def test_few_rows_of_fp8_experts_equal_the_reference(rows: int, hidden: int, width: int) -> None:
    case = some_experts(rows, 3, 0.3, seed=int(torch.randint(2**31, ())), hidden=hidden, width=width)
    gate_up, down = quantise_experts(case.gate_up), quantise_experts(case.down)
    found = moe.few_rows(case.x, case.ids, case.weights, gate_up, down, first=case.first, limit=1.0)
    wanted = reference.experts(
        case.x.float(), case.ids, case.weights, gate_up, down, first=case.first, limit=1.0
    )  # fmt: skip
    assert found.isfinite().all()
    # Rounding to e4m3 averages less over 128 channels than over thousands.
    assert (found - wanted).norm() <= (1.5 if hidden == 128 else 1) * FP8_TOLERANCE * wanted.norm()
    again = moe.experts(case.x, case.ids, case.weights, gate_up, down, first=case.first, limit=1.0)
    assert torch.equal(found, again)


COUNTS = st.one_of(st.integers(0, 3), st.sampled_from([63, 64, 65, 127, 128, 129, 256]), st.integers(0, 400))


def product_case(
    counts: list[int], blocks: tuple[int, int], spare: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, QuantisedExperts]:
    """Rows, ends and weights of 128 * blocks channels; `spare` rows of NaN belong to no expert."""
    generator = generator_of(seed, "cuda")
    depth, width = (128 * count for count in blocks)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    rows = sum(counts)
    # Blocks of very different size, so that a scale at the wrong place shows.
    sizes = torch.randint(-3, 4, (rows + spare, depth // 128), generator=generator, device="cuda").float().exp2()
    x = normal(generator, rows + spare, depth) * sizes.repeat_interleave(128, dim=1).bfloat16()
    x[rows:] = float("nan")
    shape = (len(counts), width // 128, depth // 128)
    sizes = torch.randint(-3, 4, shape, generator=generator, device="cuda").float().exp2()
    spread = sizes.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    weight = quantise_experts(normal(generator, len(counts), width, depth, dtype=torch.float32) * spread)
    # Scales of a checkpoint need not be powers of two.
    scales = weight.scales * (1 + torch.rand(weight.scales.shape, generator=generator, device="cuda"))
    return x, ends, QuantisedExperts(codes=weight.codes, scales=scales)


@needs_gpu
@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(COUNTS, min_size=1, max_size=9),
    blocks=st.tuples(st.integers(1, 11), st.integers(1, 5)),
    spare=st.integers(0, 300),
    seed=SEEDS,
)
def test_fp8_grouped_gemm_equals_its_dequantised_operands(
    counts: list[int], blocks: tuple[int, int], spare: int, seed: int
) -> None:
    x, ends, weight = product_case(counts, blocks, spare, seed)
    found = moe.grouped_gemm_fp8(x, ends, weight.codes, weight.scales)
    rows = sum(counts)
    if rows:
        assert product_error(found, x, ends, weight, torch.arange(rows, device="cuda")) <= 1
    assert found[rows:].isnan().all(), "rows of no expert are left alone"
    assert torch.equal(found[:rows], moe.grouped_gemm_fp8(x, ends, weight.codes, weight.scales)[:rows])


@needs_gpu
@pytest.mark.parametrize("counts", [[5000], [0] * 31 + [2500], [130] * 40, [1] * 300], ids=str)
def test_fp8_grouped_gemm_of_many_tiles(counts: list[int]) -> None:
    """More row tiles than are walked together, more tiles than multiprocessors, very many experts."""
    seed = int(torch.randint(2**31, ()))
    x, ends, weight = product_case(counts, (3, 5), 7, seed)
    found = moe.grouped_gemm_fp8(x, ends, weight.codes, weight.scales)
    assert product_error(found, x, ends, weight, torch.arange(sum(counts), device="cuda")) <= 1, f"seed {seed}"


@needs_gpu
@pytest.mark.parametrize("ends", [[200, 100], [-5, 90], [40, 2**31 - 1]], ids=str)
def test_ends_that_make_no_sense_touch_no_row_outside(ends: list[int]) -> None:
    x, _, weight = product_case([60, 60], (2, 2), 0, 3)
    guarded = torch.full((360, 256), 7.0, dtype=torch.bfloat16, device="cuda")
    inside = guarded[120:240]
    call_op("moe_grouped_gemm", inside, x, torch.tensor(ends, device="cuda").int(), weight.codes, weight.scales)
    torch.cuda.synchronize()
    assert (guarded[:120] == 7).all()
    assert (guarded[240:] == 7).all()


@needs_gpu
@pytest.mark.parametrize(("depth", "width"), [(64, 128), (128, 192)])
def test_blocks_that_are_not_whole_are_refused(depth: int, width: int) -> None:
    x = torch.zeros((4, depth), dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros((1, width, depth), device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones((1, depth // 128, width // 128), device="cuda")
    with pytest.raises(EngineError, match="not supported by this build"):
        moe.grouped_gemm_fp8(x, torch.tensor([4], device="cuda").int(), weight, scales)
