"""Near ties of routers and of the Indexer: the only places where rounding may change an answer by more than rounding.

A row whose k-th and (k + 1)-th score differ by less than the rounding of fp32 is routed either way by equally correct
programs. Comparisons in fp32 with another program accept a difference only where such a tie is shown to be there, and
draw again.
"""

from __future__ import annotations

from typing import Any

import torch

from trt_redknot import Engine, Request, Tokens
from trt_redknot.ops.reference import indexer, moe
from trt_redknot.ops.reference.attention import same_sequence_blocks

NEAR = 3e-6


def _gap(scores: torch.Tensor, k: int) -> float:
    ordered = scores.sort(dim=1, descending=True).values
    if ordered.shape[1] <= k:
        return float("inf")
    gaps = ordered[:, k - 1] - ordered[:, k]
    return float(gaps[gaps.isfinite()].min()) if gaps.isfinite().any() else float("inf")


class _Watching:
    """Passes every op on, and notes the smallest gap at which a selection was cut off."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.smallest = float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route_learned(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **how: Any) -> Any:
        scores = moe._scores(x, weight, how["scoring"]) + bias
        self.smallest = min(self.smallest, _gap(scores, how["top_k"]))
        return self._ops.route_learned(x, weight, bias, **how)

    def lightning_indexer(self, q: Any, weights: Any, keys: Any, table: Any, rope: Any, *, top_k: int) -> Any:
        for block, segments in same_sequence_blocks(table, q.shape[0], 64):
            scores = indexer.index_scores(
                q[block], weights[block], keys, table.positions[block], table.visible[block], segments, rope
            )
            self.smallest = min(self.smallest, _gap(scores, top_k))
        return self._ops.lightning_indexer(q, weights, keys, table, rope, top_k=top_k)


def smallest_gap(engine: Engine, tokens: list[int]) -> float:
    """The smallest gap at which a router or the Indexer cut off its selection, over all rows and layers."""
    walk = engine._context.walk
    watching = _Watching(walk._ops)
    walk._ops = watching  # type: ignore[assignment]
    try:
        engine.generate(Request(segments=[Tokens(tokens)], max_new_tokens=1))
    finally:
        walk._ops = watching._ops
    return watching.smallest
