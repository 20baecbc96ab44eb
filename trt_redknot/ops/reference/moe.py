"""Routers, adaptive fanout (docs/policy.md) and experts (paper section 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trt_redknot.ops.experts import QuantisedExperts
from trt_redknot.ops.reference.numerics import wide
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows

MIN_FANOUT = 3
_NORM_EPS = 1e-20


def _scores(x_RM: torch.Tensor, weight_XM: torch.Tensor, scoring: str) -> torch.Tensor:
    logits = F.linear(x_RM, weight_XM.to(x_RM.dtype)).to(wide(x_RM.dtype))
    if scoring == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    if scoring == "sigmoid":
        return logits.sigmoid()
    assert scoring == "softmax", scoring
    return logits.softmax(-1)


def adaptive_fanout(weights_Rk: torch.Tensor, tau: float) -> torch.Tensor:
    """Experts a row runs, by its router weights sorted heaviest first: int64 [R].

    K is the least k of 3 .. top_k whose share of the weights reaches tau, else top_k. tau = 1 is native routing.
    """
    top_k = weights_Rk.shape[1]
    if tau >= 1.0 or top_k <= MIN_FANOUT:
        return torch.full((weights_Rk.shape[0],), top_k, dtype=torch.int64, device=weights_Rk.device)
    share = weights_Rk.cumsum(1) / weights_Rk.sum(1, keepdim=True)
    short = (share[:, MIN_FANOUT - 1 : top_k - 1] < tau).sum(1)
    return MIN_FANOUT + short


def route_learned(
    x_RM: torch.Tensor,
    weight_XM: torch.Tensor,
    bias_X: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    scoring: str,
    tau: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(x_RM, weight_XM, scoring)
    ids = (scores + bias_X.to(scores.dtype)).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    weights, order = weights.sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    weights = weights / (weights.sum(1, keepdim=True) + _NORM_EPS)
    fanout_R = adaptive_fanout(weights, tau)
    dropped = torch.arange(top_k, device=ids.device).unsqueeze(0) >= fanout_R.unsqueeze(1)
    # The experts that run keep the weights they had among all top_k: nothing is renormalised.
    return ids.masked_fill(dropped, -1), (weights * scale).masked_fill(dropped, 0)


def route_hash(
    x_RM: torch.Tensor,
    weight_XM: torch.Tensor,
    table_Vk: torch.Tensor,
    tokens_R: torch.Tensor,
    *,
    scale: float,
    scoring: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if tokens_R.numel() and not (int(tokens_R.min()) >= 0 and int(tokens_R.max()) < table_Vk.shape[0]):
        raise ValueError(
            f"token ids must be in [0, {table_Vk.shape[0]}), found {int(tokens_R.min())} .. {int(tokens_R.max())}"
        )
    scores = _scores(x_RM, weight_XM, scoring)
    ids = table_Vk[tokens_R].long()
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(1, keepdim=True) + _NORM_EPS) * scale


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def _expert_linear(x: torch.Tensor, weight: torch.Tensor | QuantisedExperts, expert: int) -> torch.Tensor:
    """Rows through one expert's weight. FP8 weights meet FP8 rows, as they do in the tensor cores."""
    if not isinstance(weight, QuantisedExperts):
        return F.linear(x, weight[expert])
    rows = unpack_rows(pack_rows(x), x.shape[1], x.dtype)
    return F.linear(rows, weight.expert(expert, x.dtype))


def experts(
    x_RM: torch.Tensor,
    ids_Rk: torch.Tensor,
    weights_Rk: torch.Tensor,
    gate_up: torch.Tensor | QuantisedExperts,
    down: torch.Tensor | QuantisedExperts,
    *,
    first: int,
    limit: float,
) -> torch.Tensor:
    output = torch.zeros_like(x_RM)
    for expert in range(gate_up.shape[0]):
        rows, slots = torch.where(ids_Rk == first + expert)
        if rows.numel() == 0:
            continue
        gate, up = _expert_linear(x_RM[rows], gate_up, expert).chunk(2, dim=-1)
        result = _expert_linear(_swiglu(gate, up, limit), down, expert) * weights_Rk[rows, slots].unsqueeze(1)
        output.index_add_(0, rows, result.to(output.dtype))
    return output


def shared_expert(
    x_RM: torch.Tensor, gate_FM: torch.Tensor, up_FM: torch.Tensor, down_MF: torch.Tensor, *, limit: float
) -> torch.Tensor:
    return F.linear(_swiglu(F.linear(x_RM, gate_FM), F.linear(x_RM, up_FM), limit), down_MF)
