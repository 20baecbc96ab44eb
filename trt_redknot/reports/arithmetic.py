"""Multiply-adds of the major operators, counted from the geometry and from positions; nothing is sampled or fitted.

A layer's cost is linear in four counts: rows that run, (head, row) pairs computed online, (head, key) pairs attended,
(row, entry) pairs scored by the Indexer, and routed experts executed. :class:`LayerCost` holds the factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.config.geometry import AttentionKind, ModelGeometry

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Multiply-adds of one layer per unit of work.

    Attributes:
        row: per row that runs: q_a, kv, compressor, Indexer projections, W_b, router, shared expert, mHC.
        head: per online (head, row) pair: q_b and W_a.
        key: per online (head, key) pair: scores and values.
        scored: per (row, visible entry) pair of the Indexer.
        expert: per routed expert executed for a row.
    """

    row: int
    head: int
    key: int
    scored: int
    expert: int


def layer_cost(geometry: ModelGeometry, layer: int) -> LayerCost:
    """The factors of `layer`."""
    g = geometry
    kind = g.attention_kinds[layer]
    row = g.hidden * (g.q_lora_rank + g.head_dim)
    row += g.projected * g.hidden
    row += g.hidden * g.experts
    row += 3 * g.hidden * g.expert_width
    row += 2 * _mixing(g)
    scored = 0
    if kind is AttentionKind.HCA:
        row += 2 * g.hidden * g.head_dim
    elif kind is AttentionKind.CSA:
        # Two pooled series (the windows overlap), each with values and gates, of the entries and of the index keys.
        row += 4 * g.hidden * (g.head_dim + g.index_dim)
        row += g.q_lora_rank * g.index_heads * g.index_dim + g.hidden * g.index_heads
        scored = g.index_heads * g.index_dim
    return LayerCost(
        row=row,
        head=g.head_dim * (g.q_lora_rank + g.output_lora_rank),
        key=2 * g.head_dim,
        scored=scored,
        expert=3 * g.hidden * g.expert_width,
    )


def head_cost(geometry: ModelGeometry) -> int:
    """Collapse of the streams and the vocabulary projection for the one row whose logits choose the first token."""
    width = geometry.streams * geometry.hidden
    return geometry.streams * width + width + geometry.hidden * geometry.vocab


def attended_keys(geometry: ModelGeometry, layer: int, visible: Counts) -> Counts:
    """Keys each row attends to in `layer`, int64 [N]: its sliding window and the visible (CSA: selected) entries."""
    window = np.minimum(np.arange(1, visible.shape[0] + 1, dtype=np.int64), geometry.window)
    kind = geometry.attention_kinds[layer]
    if kind is AttentionKind.SLIDING:
        return window
    return window + (np.minimum(visible, geometry.index_topk) if kind is AttentionKind.CSA else visible)


def _mixing(g: ModelGeometry) -> int:
    """One hyper-connection: the projection of the flattened streams, the collapse, the expansion and the mix."""
    width = g.streams * g.hidden
    return width * (2 + g.streams) * g.streams + 2 * width + g.streams * width
