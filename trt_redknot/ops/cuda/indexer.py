"""`lightning_indexer` on the GPU; meaning and arguments are those of `ops/reference/indexer.py`."""

from __future__ import annotations

import torch

from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.reference.numerics import rotate
from trt_redknot.ops.reference.packing import unpack_rows
from trt_redknot.ops.tables import ENTRY_COUNT, ENTRY_OFFSET, START, AttentionTable

INDEX_HEADS = 64
INDEX_DIM = 128
MAX_SELECTED = 1024
# Scores of this many bytes lie in memory at a time; rows are scored in as many rounds as that takes.
_SCORE_BYTES = 512 * 2**20
_LEAST_ROWS = 4


def indexer_supported(heads: int, dim: int, rope_dim: int, top_k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel serves layers of this geometry and compute dtype; others take the reference."""
    geometry = (heads, dim, rope_dim) == (INDEX_HEADS, INDEX_DIM, 64)
    return geometry and 0 < top_k <= MAX_SELECTED and dtype is torch.bfloat16


def lightning_indexer(
    q_RHI: torch.Tensor,
    weights_RH: torch.Tensor,
    keys_EI: torch.Tensor,
    table: AttentionTable,
    rope: torch.Tensor,
    *,
    top_k: int,
    fp8: bool = True,
) -> torch.Tensor:
    """Pool rows of the best visible entries of each row, on the current stream, no synchronisation.

    Args:
        q_RHI: bf16 [R, 64, 128], not rotated.
        weights_RH: bf16 [R, 64].
        keys_EI: bf16 [E, 128], or packed uint8 [E, 132] (:func:`trt_redknot.ops.reference.packing.pack_rows`).
        rope: [positions, 32, 2]; fp32, other float dtypes are widened.
        top_k: 1 to 1024.
        fp8: score in e4m3 with one scale a head of q and one a key; otherwise in bf16, which needs bf16 keys.

    Returns:
        int64 [R, top_k], best first, ties to the earlier entry, -1 where there are fewer.

    Raises:
        EngineError: the libraries are missing, or a tensor has a dtype, shape or device that the kernel does not serve.
    """
    load_kernels()
    selected = torch.empty((q_RHI.shape[0], top_k), dtype=torch.int64, device=q_RHI.device)
    entries = keys_EI.shape[0]
    rows = max(_LEAST_ROWS, min(q_RHI.shape[0], _SCORE_BYTES // max(1, 4 * entries)))
    size = torch.ops.redknot.lightning_indexer_workspace(entries, rows)
    workspace = torch.empty(size, dtype=torch.uint8, device=q_RHI.device)
    call_op(
        "lightning_indexer", selected, workspace, q_RHI, weights_RH, keys_EI, table.segments, table.row_segments,
        table.positions, table.visible, rope.float(), fp8,
    )  # fmt: skip
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
    """Per entry of the rows' (single) sequence: the sum of the scores that the rows give it, and how many see it.

    By ops of torch that look at no table on the host; sums in fp32. Keys, not queries, are turned to where the rows
    see them, so that one product does for all segments.

    Args:
        keys_EI: bf16 [E, I], or packed uint8 rows.

    Returns:
        fp32 [entries], [entries]; a row that may not see an entry adds to neither.
    """
    heads, dim = q_RHI.shape[1:]
    total = q_RHI.new_zeros(entries, dtype=torch.float32)
    seen = torch.zeros_like(total)
    if q_RHI.shape[0] == 0 or entries == 0:
        return total, seen
    order = torch.arange(entries, device=q_RHI.device)
    keys = _turned_keys(keys_EI, table, rope, order, dim)
    query = rotate(q_RHI.float(), rope, table.positions)
    weights = weights_RH.float() * (heads * dim) ** -0.5
    block = max(1, _SCORE_BYTES // (4 * heads * entries))
    for first in range(0, q_RHI.shape[0], block):
        rows = slice(first, first + block)
        scores = torch.matmul(query[rows], keys.T).relu_()
        of_row = torch.bmm(weights[rows].unsqueeze(1), scores).squeeze(1)
        visible = order < table.visible[rows].unsqueeze(1)
        # What nobody has written yet is NaN.
        total += of_row.masked_fill_(~visible, 0).sum(0)
        seen += visible.sum(0)
    return total, seen


def _turned_keys(
    keys_EI: torch.Tensor, table: AttentionTable, rope: torch.Tensor, order: torch.Tensor, dim: int
) -> torch.Tensor:
    """Keys of the sequence's entries, turned from their segments' frames to the request's: fp32 [entries, I]."""
    segments = table.segments
    number = torch.arange(segments.shape[0], device=segments.device)
    first, last = table.row_segments[0, 0], table.row_segments[0, 1]
    counts = torch.where((number >= first) & (number < last), segments[:, ENTRY_COUNT], 0)
    of_entry = torch.searchsorted(counts.cumsum(0), order, right=True).clamp_(max=segments.shape[0] - 1)
    stored = keys_EI.index_select(0, order + segments.index_select(0, first.unsqueeze(0))[0, ENTRY_OFFSET])
    keys = unpack_rows(stored, dim, torch.float32) if stored.dtype is torch.uint8 else stored.float()
    return rotate(keys, rope, segments[:, START].index_select(0, of_entry))
