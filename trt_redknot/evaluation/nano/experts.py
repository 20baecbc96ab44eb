"""The experts of the lean forward: all of them as one product, weighted by the router."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trt_redknot.evaluation.nano.sizes import LayerKind, Parameters, Sizes, Tensor


def route(hidden: Tensor, tokens: Tensor, p: Parameters, kind: LayerKind, sizes: Sizes) -> Tensor:
    """Weights of all experts, fp32 [R, E]: zero for those that the router does not choose."""
    scores = sizes.scoring(F.linear(hidden, p["mlp.gate.weight"]).float())
    if kind.hashed:
        ids = p["mlp.gate.tid2eid"][tokens.flatten()]
    else:
        biased = scores.detach() + p["mlp.gate.e_score_correction_bias"]
        ids = biased.topk(sizes.experts_per_token, dim=-1).indices
    picked = scores.gather(1, ids)
    picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * sizes.routed_scale
    return torch.zeros_like(scores).scatter(1, ids, picked)


def expert_products(
    hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, shared_gate: Tensor, shared_up: Tensor,
    shared_down: Tensor, limit: float,
) -> Tensor:  # fmt: skip
    """Routed and shared experts, [R, M]; every expert runs on every row, the router's zeros drop the others.

    Args:
        weights: [R, E].
        gate_up, down: [E, 2 F, M] and [E, M, F].
    """
    both = F.linear(hidden, gate_up.flatten(0, 1)).unflatten(-1, gate_up.shape[:2])
    gate, up = both.chunk(2, dim=-1)
    active = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    active = active * weights.unsqueeze(-1).to(active.dtype)
    routed = active.flatten(1) @ down.transpose(1, 2).flatten(0, 1)
    gate = F.linear(hidden, shared_gate).clamp(max=limit)
    up = F.linear(hidden, shared_up).clamp(-limit, limit)
    output: Tensor = routed + F.linear(F.silu(gate) * up, shared_down)
    return output
