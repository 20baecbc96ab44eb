"""Routers and adaptive fanout: the K rule, original weights, bounds of the hash table."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.ops.experts import EXPERT_BLOCK, quantise_experts
from trt_redknot.ops.reference.moe import adaptive_fanout, experts, route_hash, route_learned


@given(
    weights=st.lists(st.floats(1e-3, 10), min_size=1, max_size=8), tau=st.floats(0.01, 1.0),
)  # fmt: skip
def test_k_rule(weights: list[float], tau: float) -> None:
    ordered = torch.tensor(sorted(weights, reverse=True), dtype=torch.float64)
    k = int(adaptive_fanout(ordered[None], tau)[0])
    shares = (ordered / ordered.sum()).cumsum(0)
    top_k = len(weights)
    expected = next((n for n in range(3, top_k) if shares[n - 1] >= tau), top_k) if tau < 1 else top_k
    if top_k > 3 and tau < 1 and min(abs(float(share) - tau) for share in shares) < 1e-12:
        return
    assert k == expected
    assert min(3, top_k) <= k <= top_k


@given(st.lists(st.floats(1e-3, 1.0), min_size=6, max_size=6), st.floats(0.01, 0.5))
def test_a_low_tau_always_runs_three_of_six(weights: list[float], tau: float) -> None:
    """The three heaviest of six hold at least half of the weight."""
    ordered = torch.tensor(sorted(weights, reverse=True), dtype=torch.float64)
    assert int(adaptive_fanout(ordered[None], tau)[0]) == 3


def test_dropped_experts_leave_the_others_their_weights() -> None:
    x, weight = torch.randn(50, 12, dtype=torch.float64), torch.randn(9, 12, dtype=torch.float64)
    bias = torch.randn(9, dtype=torch.float64) * 0.1

    def route(tau: float) -> tuple[torch.Tensor, torch.Tensor]:
        return route_learned(x, weight, bias, top_k=6, scale=1.5, scoring="sqrtsoftplus", tau=tau)

    ids, shares = route(1.0)
    few, few_shares = route(0.7)
    torch.testing.assert_close(shares.sum(1), torch.full((50,), 1.5, dtype=torch.float64))
    kept = few >= 0
    assert torch.equal(few[kept], ids[kept])
    assert torch.equal(few_shares[kept], shares[kept])
    assert (few_shares[~kept] == 0).all()
    assert (kept.sum(1) < 6).any()
    assert (shares[:, :-1] >= shares[:, 1:]).all()
    # Selection is by score plus bias, weights are the scores alone.
    scores = torch.nn.functional.softplus(x @ weight.T).sqrt()
    chosen = (scores + bias).topk(6).indices.sort().values
    assert torch.equal(ids.sort().values, chosen)
    expected = scores.gather(1, ids)
    torch.testing.assert_close(shares, expected / expected.sum(1, keepdim=True) * 1.5)


@pytest.mark.parametrize("bad", [-1, 30])
def test_hash_router_refuses_tokens_outside_its_table(bad: int) -> None:
    table = torch.randint(0, 8, (30, 4), dtype=torch.int32)
    x, weight = torch.randn(3, 5), torch.randn(8, 5)
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 30\)"):
        route_hash(x, weight, table, torch.tensor([1, bad, 2]), scale=1.0, scoring="sqrtsoftplus")
    ids, shares = route_hash(x, weight, table, torch.tensor([1, 29, 2]), scale=2.5, scoring="sqrtsoftplus")
    assert torch.equal(ids, table[[1, 29, 2]].long())
    torch.testing.assert_close(shares.sum(1), torch.full((3,), 2.5))


def test_experts_of_all_ranks_add_up() -> None:
    rows, hidden, width, count, ranks = 40, 6, 5, 8, random.choice([1, 2, 3, 8])
    x = torch.randn(rows, hidden, dtype=torch.float64) * 3
    gate_up = torch.randn(count, 2 * width, hidden, dtype=torch.float64)
    down = torch.randn(count, hidden, width, dtype=torch.float64)
    ids = torch.stack([torch.randperm(count)[:4] for _ in range(rows)])
    ids[::3, 2:] = -1
    shares = torch.rand(rows, 4, dtype=torch.float64)
    total = torch.zeros_like(x)
    bounds = [round(rank * count / ranks) for rank in range(ranks + 1)]
    for first, last in pairwise(bounds):
        total += experts(x, ids, shares, gate_up[first:last], down[first:last], first=first, limit=2.0)
    expected = torch.zeros_like(x)
    for row in range(rows):
        for expert, share in zip(ids[row].tolist(), shares[row].tolist(), strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[row]).chunk(2)
                gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
                expected[row] += share * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    torch.testing.assert_close(total, expected, atol=1e-10, rtol=1e-10)
    assert math.isfinite(float(total.sum()))


@given(seed=st.integers(0, 2**31), spread=st.integers(0, 40))
def test_fp8_experts_are_off_by_half_a_step_at_most(seed: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 2 * EXPERT_BLOCK, EXPERT_BLOCK)
    sizes = torch.randint(-spread, spread + 1, (2, 2, 1, 1, 1), generator=generator).float().exp2()
    weight = torch.randn(shape, generator=generator).view(2, 2, EXPERT_BLOCK, 1, EXPERT_BLOCK) * sizes
    weight = weight.view(shape)
    found = quantise_experts(weight)
    assert found.shape == weight.shape
    assert bool((found.scales.log2() == found.scales.log2().round()).all()), "scales are powers of two"
    for index in range(2):
        back = found.expert(index, torch.float64)
        step = found.scales[index].T.repeat_interleave(EXPERT_BLOCK, 0).repeat_interleave(EXPERT_BLOCK, 1).double()
        # Three bits of mantissa; below 2**-6 of the scale the step is constant.
        bound = torch.maximum(weight[index].double().abs() / 16, step * 2.0**-10)
        assert bool(((back - weight[index].double()).abs() <= bound).all())


def test_experts_of_nothing_but_zeros() -> None:
    found = quantise_experts(torch.zeros(1, EXPERT_BLOCK, EXPERT_BLOCK))
    assert bool(found.scales.isfinite().all())
    assert not found.expert(0, torch.float32).any()
