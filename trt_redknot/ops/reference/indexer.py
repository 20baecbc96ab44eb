"""The Lightning Indexer: which compressed entries a row attends to (paper section 2.3.1, equations 13 to 17)."""

from __future__ import annotations

import torch

from trt_redknot.ops.reference.attention import same_sequence_blocks
from trt_redknot.ops.reference.numerics import rotate, wide
from trt_redknot.ops.tables import ENTRY_COUNT, ENTRY_OFFSET, START, AttentionTable

# Rows scored at a time: bounds the [rows, heads, entries] score tensor.
_ROW_BLOCK = 64


def index_scores(
    q_RHI: torch.Tensor,
    weights_RH: torch.Tensor,
    keys_EI: torch.Tensor,
    positions_R: torch.Tensor,
    visible_R: torch.Tensor,
    segments: list[list[int]],
    rope: torch.Tensor,
) -> torch.Tensor:
    """Scores of rows of one sequence against all its entries, -inf where a row may not see the entry: [R, E]."""
    dtype = wide(q_RHI.dtype)
    heads, dim = q_RHI.shape[1:]
    weights = weights_RH.to(dtype) * heads**-0.5
    parts = []
    for segment in segments:
        keys = keys_EI[segment[ENTRY_OFFSET] : segment[ENTRY_OFFSET] + segment[ENTRY_COUNT]].to(dtype)
        q = rotate(q_RHI.to(dtype), rope, (positions_R - segment[START]).clamp(min=0))
        scores = torch.relu(torch.matmul(q, keys.T)) * dim**-0.5
        parts.append((scores * weights.unsqueeze(-1)).sum(1))
    scores = torch.cat(parts, dim=1)
    entries_E = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(entries_E.unsqueeze(0) >= visible_R.unsqueeze(1), float("-inf"))


def lightning_indexer(
    q_RHI: torch.Tensor,
    weights_RH: torch.Tensor,
    keys_EI: torch.Tensor,
    table: AttentionTable,
    rope: torch.Tensor,
    *,
    top_k: int,
) -> torch.Tensor:
    rows = q_RHI.shape[0]
    selected = torch.full((rows, top_k), -1, dtype=torch.int64, device=q_RHI.device)
    for block, segments in same_sequence_blocks(table, rows, _ROW_BLOCK):
        scores = index_scores(
            q_RHI[block], weights_RH[block], keys_EI, table.positions[block], table.visible[block], segments, rope
        )
        k = min(top_k, scores.shape[1])
        # A stable sort, not topk: ties must fall to the earlier entry on every backend.
        best = scores.sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :k] + segments[0][ENTRY_OFFSET]
        selected[block, :k] = torch.where(best.values[:, :k].isinf(), -1, chosen)
    return selected


def index_salience(
    q_RHI: torch.Tensor,
    weights_RH: torch.Tensor,
    keys_EI: torch.Tensor,
    table: AttentionTable,
    rope: torch.Tensor,
    *,
    entries: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per entry of the rows' (single) sequence: the sum of the scores that the rows give it, and how many rows see it.

    Returns two wide-dtype tensors [entries]; a row that may not see an entry adds to neither.
    """
    dtype = wide(q_RHI.dtype)
    total = torch.zeros(entries, dtype=dtype, device=q_RHI.device)
    seen = torch.zeros(entries, dtype=dtype, device=q_RHI.device)
    for block, segments in same_sequence_blocks(table, q_RHI.shape[0], _ROW_BLOCK):
        scores = index_scores(
            q_RHI[block], weights_RH[block], keys_EI, table.positions[block], table.visible[block], segments, rope
        )
        visible = ~scores.isinf()
        total[: scores.shape[1]] += scores.masked_fill(~visible, 0).sum(0)
        seen[: scores.shape[1]] += visible.sum(0)
    return total, seen
