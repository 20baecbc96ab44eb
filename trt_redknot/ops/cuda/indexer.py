"""`lightning_indexer` and `index_salience` on the GPU; meanings are those of `ops/reference/indexer.py`."""

from __future__ import annotations

import torch

from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.tables import AttentionTable

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
    call_op(
        "lightning_indexer", selected, _workspace(q_RHI, keys_EI), q_RHI, weights_RH, keys_EI, table.segments,
        table.row_segments, table.positions, table.visible, rope.float(), fp8,
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

    The scores are the Indexer's, in bf16 for bf16 keys; sums in fp32, in the order of the rows. On the current stream,
    no synchronisation.

    Args:
        q_RHI: bf16 [R, 64, 128], not rotated.
        weights_RH: bf16 [R, 64].
        keys_EI: bf16 [E, 128], or packed uint8 [E, 132].

    Returns:
        fp32 [entries], [entries]; a row that may not see an entry adds to neither.

    Raises:
        EngineError: as :func:`lightning_indexer`.
    """
    load_kernels()
    total = torch.empty(entries, dtype=torch.float32, device=q_RHI.device)
    seen = torch.empty_like(total)
    call_op(
        "index_salience", total, seen, _workspace(q_RHI, keys_EI), q_RHI, weights_RH, keys_EI, table.segments,
        table.row_segments, table.positions, table.visible, rope.float(), keys_EI.dtype is torch.uint8,
    )  # fmt: skip
    return total, seen


def _workspace(q_RHI: torch.Tensor, keys_EI: torch.Tensor) -> torch.Tensor:
    """For the scores of as many rows as are worth a round."""
    entries = keys_EI.shape[0]
    rows = max(_LEAST_ROWS, min(q_RHI.shape[0], _SCORE_BYTES // max(1, 4 * entries)))
    size = torch.ops.redknot.lightning_indexer_workspace(entries, rows)
    return torch.empty(size, dtype=torch.uint8, device=q_RHI.device)
