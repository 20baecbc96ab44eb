"""`seg_latent_attention` on the GPU; meaning and arguments are those of `ops/reference/attention.py`."""

from __future__ import annotations

import torch

from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.tables import AttentionTable

HEAD_DIM = 512
ROPE_DIM = 64
MAX_SELECTED = 1024


def attention_supported(head_dim: int, rope_dim: int, top_k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel serves layers of this geometry and compute dtype; others take the reference."""
    return (head_dim, rope_dim) == (HEAD_DIM, ROPE_DIM) and top_k <= MAX_SELECTED and dtype is torch.bfloat16


def seg_latent_attention(
    q_global: torch.Tensor,
    q_local: torch.Tensor,
    table: AttentionTable,
    latents: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sinks_global: torch.Tensor,
    sinks_local: torch.Tensor,
    rope: torch.Tensor,
    *,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a segment table on the current stream, no synchronisation.

    Args:
        q_global, q_local: bf16 [R, Hg, 512], [R1, Hl, 512]: normed, not rotated.
        latents, entries: pools of one dtype, bf16 [rows, 512] or packed uint8 [rows, 640]
            (:mod:`trt_redknot.ops.reference.packing`), read in place. Where rows have more than 32 heads, what they see
            of packed pools becomes bf16 in scratch memory of 1 KB a pool row.
        selected: int64 [R, k], k at most 1024, distinct in each row, -1 for none.
        rope: [positions, 32, 2]; fp32, other float dtypes are widened.

    Returns:
        bf16 [R, Hg, 512], [R1, Hl, 512].

    Raises:
        EngineError: the libraries are missing, or a tensor has a dtype, shape or device that the kernel does not serve.
    """
    outputs = torch.empty_like(q_global), torch.empty_like(q_local)
    call_op(
        "seg_latent_attention", *outputs, q_global, q_local, table.segments, table.row_segments, table.positions,
        table.visible, latents, entries, selected, sinks_global.float(), sinks_local.float(), rope.float(), window,
    )  # fmt: skip
    return outputs
