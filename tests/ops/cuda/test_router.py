"""Routers on the GPU against the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benches.common import relative_error
from benches.elementwise_cases import generator_of, normal
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda import moe
from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.reference import moe as reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEEDS = st.integers(0, 2**31)
TYPICAL = settings(deadline=None, max_examples=20)
SCORINGS = st.sampled_from(["sqrtsoftplus", "sigmoid", "softmax"])
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
@given(
    rows=st.integers(1, 300),
    experts=st.sampled_from([32, 64, 256, 384, 512]),
    top_k=st.integers(1, 8),
    tau=st.sampled_from([0.6, 0.85, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.1, 1.0, 20.0]),
    seed=SEEDS,
)
def test_random_logits_choose_what_the_reference_chooses(
    rows: int, experts: int, top_k: int, tau: float, dtype: torch.dtype, spread: float, seed: int
) -> None:
    """With a bias of either sign, so that the order of choice is not that of the weights."""
    generator = generator_of(seed, "cuda")
    logits = normal(generator, rows, experts, dtype=torch.float32).mul(spread).to(dtype)
    bias = normal(generator, experts, dtype=torch.float32) * 0.5
    ids, weights, wanted_ids, wanted = route(logits, bias, top_k, tau, "sqrtsoftplus")
    clear = clear_rows(logits, bias, top_k, tau)
    assert torch.equal(ids[clear], wanted_ids[clear])
    assert relative_error(weights[clear], wanted[clear]) < SCORE_TOLERANCE
    # Where rounding decides, what is chosen scores as much.
    chosen = reference._scores(logits.double(), torch.eye(experts, device="cuda"), "sqrtsoftplus") + bias.double()
    native = route(logits, bias, top_k, 1.0, "sqrtsoftplus")
    assert relative_error(chosen.gather(1, native[0]).sum(1), chosen.gather(1, native[2]).sum(1)) < SCORE_TOLERANCE


@needs_gpu
@settings(deadline=None, max_examples=8)
@given(
    rows=st.integers(65536, 65600),
    experts=st.sampled_from([256, 384]),
    tau=st.sampled_from([0.85, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.1, 1.0, 20.0]),
    bias_spread=st.sampled_from([0.0, 0.1, 0.5, 3.0]),
    odd=st.sampled_from([None, float("nan"), float("-inf"), float("inf")]),
    seed=SEEDS,
)
def test_many_rows_choose_what_the_reference_chooses(
    rows: int,
    experts: int,
    tau: float,
    dtype: torch.dtype,
    spread: float,
    bias_spread: float,
    odd: float | None,
    seed: int,
) -> None:
    """Rows of equal logits, and with an odd one, are held to a call of few rows, which another kernel routes."""
    generator = generator_of(seed, "cuda")
    logits = normal(generator, rows, experts, dtype=torch.float32).mul(spread).to(dtype)
    bias = normal(generator, experts, dtype=torch.float32) * bias_spread
    logits[5], logits[8190] = 0.25, -3
    if odd is not None:
        logits[77, 3] = logits[rows - 1, experts - 1] = odd
    ids, weights, wanted_ids, wanted = route(logits, bias, 6, tau, "sqrtsoftplus")
    special = torch.tensor([5, 77, 8190, rows - 1], device="cuda")
    few_ids, few_weights, _, _ = route(logits[special].contiguous(), bias, 6, tau, "sqrtsoftplus")
    assert torch.equal(ids[special], few_ids)
    assert torch.allclose(weights[special], few_weights, rtol=1e-6, equal_nan=True)
    clear = clear_rows(logits, bias, 6, tau)
    clear[special] = False
    assert torch.equal(ids[clear], wanted_ids[clear])
    assert relative_error(weights[clear], wanted[clear]) < SCORE_TOLERANCE


def clear_rows(logits: torch.Tensor, bias: torch.Tensor, top_k: int, tau: float) -> torch.Tensor:
    """Rows in which neither an order nor the side of tau that a share falls on is up to rounding."""
    unit = torch.eye(logits.shape[1], device="cuda")
    scores = reference._scores(logits.double(), unit, "sqrtsoftplus")
    best = (scores + bias.double()).topk(min(top_k + 1, logits.shape[1])).values
    weights = reference.route_learned(
        logits.double(), unit, bias.double(), top_k=top_k, scale=1, scoring="sqrtsoftplus", tau=1
    )[1]
    between = weights.diff(dim=1).abs()
    return (
        (best.diff(dim=1).abs() > 1e-5).all(1)
        & ((between > 1e-5) | (between == 0)).all(1)
        & (((weights.cumsum(1) - tau).abs() > 1e-5) | (tau >= 1)).all(1)
    )


@needs_gpu
@pytest.mark.parametrize("logit", [float("nan"), float("-inf"), -1e4, -30.0])
def test_rows_beside_an_odd_one_are_routed_alike(logit: float) -> None:
    """One row of equal or NaN logits among others; a row of NaN chooses the first experts, as torch sorts them."""
    generator = generator_of(int(torch.randint(2**31, ())), "cuda")
    logits = torch.rand((7, 256), generator=generator, device="cuda").argsort(1).float() * 0.02
    bias = torch.zeros(256, device="cuda")
    plain, plain_weights, _, _ = route(logits, bias, 6, 1.0, "sqrtsoftplus")
    spoiled = logits.clone()
    spoiled[2] = logit
    ids, weights, wanted_ids, _ = route(spoiled, bias, 6, 1.0, "sqrtsoftplus")
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(ids[others], plain[others])
    assert torch.allclose(weights[others], plain_weights[others], rtol=1e-6)
    assert torch.equal(ids, wanted_ids)


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


@needs_gpu
def test_more_experts_than_the_router_serves_are_refused() -> None:
    logits = torch.zeros((1, 520), device="cuda")
    with pytest.raises(EngineError, match="not supported by this build"):
        route(logits, torch.zeros(520, device="cuda"), 6, 1.0, "sigmoid")
