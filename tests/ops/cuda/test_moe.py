"""Routers, permutation and experts on the GPU against the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import relative_error
from benches.elementwise_cases import ExpertCase, expert_case, generator_of, normal
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda import moe
from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.cuda.library import kernels_present
from trt_redknot.ops.experts import quantise_experts
from trt_redknot.ops.reference import moe as reference
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels_present()),
    reason="needs a CUDA GPU and the libraries that `make plugins` builds",
)
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)
SCORINGS = st.sampled_from(["sqrtsoftplus", "sigmoid", "softmax"])
# Products and the activation are rounded to bf16 between the stages, sums are fp32.
EXPERT_TOLERANCE = 1e-2
SCORE_TOLERANCE = 1e-5


def route(logits: torch.Tensor, bias: torch.Tensor, top_k: int, tau: float, scoring: str) -> tuple[torch.Tensor, ...]:
    """The learned router on given logits: kernel, then the reference in fp64 (whose weight is the identity)."""
    rows, experts = logits.shape
    ids = torch.full((rows, top_k), 77, dtype=torch.int64, device="cuda")
    weights = torch.full((rows, top_k), float("nan"), device="cuda")
    number = moe._SCORING[scoring]
    call_op("moe_route_learned", ids, weights, logits, bias, 1.5, tau, number)
    wanted = reference.route_learned(
        logits.double(),
        torch.eye(experts, device="cuda"),
        bias.double(),
        top_k=top_k,
        scale=1.5,
        scoring=scoring,
        tau=tau,
    )
    return ids, weights, *wanted


@needs_gpu
@TYPICAL
@given(
    rows=st.integers(0, 300),
    experts=st.sampled_from([8, 33, 64, 256, 384, 512]),
    top_k=st.integers(1, 8),
    tau=st.sampled_from([0.4, 0.6, 0.85, 0.95, 1.0]),
    scoring=SCORINGS,
    seed=SEEDS,
)
def test_learned_router_equals_the_reference(
    rows: int, experts: int, top_k: int, tau: float, scoring: str, seed: int
) -> None:
    generator = generator_of(seed, "cuda")
    # Logits a step apart and shuffled, so that no two orders differ by rounding.
    logits = torch.rand((rows, experts), generator=generator, device="cuda").argsort(1).float() * 0.02
    bias = torch.zeros(experts, device="cuda")
    ids, weights, wanted_ids, wanted = route(logits, bias, top_k, tau, scoring)
    share = reference.route_learned(
        logits.double(), torch.eye(experts, device="cuda"), bias.double(), top_k=top_k, scale=1, scoring=scoring, tau=1
    )[1].cumsum(1)
    # A share within rounding of tau may fall on either side.
    clear = ((share - tau).abs() > 1e-5).all(1) if tau < 1 else torch.ones(rows, dtype=torch.bool, device="cuda")
    assert torch.equal(ids[clear], wanted_ids[clear])
    assert relative_error(weights[clear], wanted[clear]) < SCORE_TOLERANCE


@needs_gpu
@TYPICAL
@given(rows=st.integers(1, 200), experts=st.sampled_from([8, 256, 384]), levels=st.integers(1, 4), seed=SEEDS)
def test_ties_fall_to_the_lower_expert(rows: int, experts: int, levels: int, seed: int) -> None:
    generator = generator_of(seed, "cuda")
    logits = torch.randint(0, levels, (rows, experts), generator=generator, device="cuda").float()
    ids, _, wanted_ids, _ = route(logits, torch.zeros(experts, device="cuda"), 6, 1.0, "sqrtsoftplus")
    assert torch.equal(ids, wanted_ids)


@needs_gpu
def test_the_bias_picks_but_does_not_weigh() -> None:
    logits = torch.zeros((1, 8), device="cuda")
    bias = torch.tensor([0.0, 5, 0, 4, 0, 3, 0, 2], device="cuda")
    ids, weights, _, _ = route(logits, bias, 4, 1.0, "sqrtsoftplus")
    assert ids.tolist() == [[1, 3, 5, 7]]
    assert torch.allclose(weights, torch.full_like(weights, 1.5 / 4))


@needs_gpu
@TYPICAL
@given(rows=st.integers(0, 200), vocab=st.integers(1, 50), experts=st.sampled_from([8, 256, 384]), seed=SEEDS)
def test_hash_router_equals_the_reference(rows: int, vocab: int, experts: int, seed: int) -> None:
    generator = generator_of(seed, "cuda")
    x, weight = normal(generator, rows, 64), normal(generator, experts, 64)
    table = torch.rand((vocab, experts), generator=generator, device="cuda").argsort(1)[:, :6].contiguous()
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    ids, weights = moe.route_hash(x, weight, table, tokens, scale=1.5, scoring="sqrtsoftplus")
    wanted_ids, wanted = reference.route_hash(x, weight, table, tokens, scale=1.5, scoring="sqrtsoftplus")
    assert torch.equal(ids, wanted_ids)
    assert relative_error(weights, wanted) < SCORE_TOLERANCE


@needs_gpu
@pytest.mark.parametrize("token", [-1, 10, 2**40])
def test_a_token_outside_the_table_is_a_fault_and_not_a_read(token: int) -> None:
    generator = generator_of(6, "cuda")
    x, weight = normal(generator, 3, 64), normal(generator, 8, 64)
    table = torch.arange(60, device="cuda").view(10, 6) % 8
    tokens = torch.tensor([2, token, 9], device="cuda")
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 10\)"):
        moe.route_hash(x, weight, table, tokens, scale=1.0, scoring="sigmoid")
    faults = torch.full((1,), 99, dtype=torch.int32, device="cuda")
    ids, weights = moe.route_hash(x, weight, table, tokens, scale=1.0, scoring="sigmoid", faults=faults)
    assert int(faults) == moe.FAULT_TOKEN
    assert ids[1].tolist() == [-1] * 6
    assert not weights[1].any()
    assert torch.equal(ids[[0, 2]], table[tokens[[0, 2]]])
    table[9, 3] = 8
    moe.route_hash(
        x, weight, table, torch.tensor([2, 2, 9], device="cuda"), scale=1.0, scoring="sigmoid", faults=faults
    )
    assert int(faults) == moe.FAULT_EXPERT


def some_experts(rows: int, held: int, dropped: float, seed: int, hidden: int = 64, width: int = 32) -> ExpertCase:
    return expert_case(
        rows, hidden, width, total=24, held=held, first=seed % 8, top_k=6, dropped=dropped, seed=seed, device="cuda"
    )


@needs_gpu
@TYPICAL
@given(
    rows=st.one_of(st.integers(0, 40), st.integers(600, 1500)),
    held=st.integers(1, 16),
    dropped=st.floats(0, 1),
    seed=SEEDS,
)
def test_permutation_is_a_stable_sort_by_expert(rows: int, held: int, dropped: float, seed: int) -> None:
    case = some_experts(rows, held, dropped, seed)
    permuted, inverse, ends = moe.permute(case.x, case.ids, first=case.first, experts=held)
    local = (case.ids - case.first).flatten()
    here = (local >= 0) & (local < held)
    order = local[here].argsort(stable=True)
    wanted = torch.full_like(local, -1, dtype=torch.int32)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device="cuda")
    wanted[here] = places.int()
    assert torch.equal(inverse.flatten(), wanted)
    assert torch.equal(ends.long(), torch.bincount(local[here], minlength=held).cumsum(0))
    rows_of = torch.arange(rows, device="cuda").repeat_interleave(6)[here]
    assert torch.equal(permuted[: order.shape[0]], case.x[rows_of[order]])


@needs_gpu
@TYPICAL
@given(rows=st.integers(0, 200), held=st.integers(1, 16), dropped=st.sampled_from([0.0, 0.3, 1.0]), seed=SEEDS)
def test_experts_equal_the_reference_and_repeat_bit_for_bit(rows: int, held: int, dropped: float, seed: int) -> None:
    case = some_experts(rows, held, dropped, seed, hidden=256, width=128)
    arguments = (case.x, case.ids, case.weights, case.gate_up, case.down)
    found = moe.experts(*arguments, first=case.first, limit=1.0)
    wanted = reference.experts(
        case.x.double(), case.ids, case.weights.double(), case.gate_up.double(), case.down.double(), first=case.first,
        limit=1.0,
    )  # fmt: skip
    assert found.isfinite().all()
    assert (found - wanted).norm() <= EXPERT_TOLERANCE * wanted.norm()
    assert torch.equal(found, moe.experts(*arguments, first=case.first, limit=1.0))


@needs_gpu
@TYPICAL
@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=9),
    blocks=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    spare=st.integers(0, 40),
    seed=SEEDS,
)
def test_fp8_grouped_gemm_equals_its_dequantised_operands(
    counts: list[int], blocks: tuple[int, int], spare: int, seed: int
) -> None:
    generator = generator_of(seed, "cuda")
    depth, width = (128 * count for count in blocks)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    rows = sum(counts)
    # Blocks of very different size, so that a scale at the wrong place shows.
    sizes = torch.randint(-3, 4, (rows + spare, depth // 128), generator=generator, device="cuda").float().exp2()
    x = normal(generator, rows + spare, depth) * sizes.repeat_interleave(128, dim=1).bfloat16()
    x[rows:] = float("nan")
    sizes = (
        torch.randint(-3, 4, (len(counts), width // 128, depth // 128), generator=generator, device="cuda")
        .float()
        .exp2()
    )
    spread = sizes.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    weight = quantise_experts(normal(generator, len(counts), width, depth, dtype=torch.float32) * spread)
    found = moe.grouped_gemm_fp8(x, ends, weight.codes, weight.scales)
    plain = unpack_rows(pack_rows(x), depth, torch.float64)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        wanted = plain[first:last] @ weight.expert(expert, torch.float64).T
        assert (found[first:last] - wanted).norm() <= EXPERT_TOLERANCE * wanted.norm()
        first = last


@needs_gpu
def test_more_experts_than_the_router_serves_are_refused() -> None:
    logits = torch.zeros((1, 520), device="cuda")
    with pytest.raises(EngineError, match="not supported by this build"):
        route(logits, torch.zeros(520, device="cuda"), 6, 1.0, "sigmoid")
