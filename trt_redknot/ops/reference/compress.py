"""Gated pooling of token windows into compressed entries (paper sections 2.3.1 and 2.3.2)."""

from __future__ import annotations

import torch

from trt_redknot.ops.reference.norms import rms_norm
from trt_redknot.ops.reference.numerics import rotate, wide
from trt_redknot.ops.tables import CompressTable


def _gather_slots(raw: torch.Tensor, slots: torch.Tensor, width: int) -> torch.Tensor:
    """Raw rows of every slot, [E, slots, width]. With two series in `raw`, the window before gives the first (Ca), the
    window itself the second (Cb). Absent slots give row 0, to be masked."""
    rows = raw[slots.clamp(min=0)]
    if raw.shape[1] == width:
        return rows
    half = slots.shape[1] // 2
    return torch.cat((rows[:, :half, :width], rows[:, half:, width:]), dim=1)


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm: torch.Tensor,
    rope: torch.Tensor,
    table: CompressTable,
    *,
    eps: float,
) -> torch.Tensor:
    width = norm.shape[0]
    if table.slots.shape[0] == 0:
        return kv.new_empty((0, width))
    dtype = wide(kv.dtype)
    values = _gather_slots(kv, table.slots, width)
    bias = ape if ape.shape[1] == width else torch.cat((ape[:, :width], ape[:, width:]))
    logits = _gather_slots(gate, table.slots, width).to(dtype) + bias.to(dtype)
    absent = (table.slots < 0).unsqueeze(-1)
    weights = logits.masked_fill(absent, float("-inf")).softmax(1).to(kv.dtype)
    # Rows that are absent may hold anything, NaN included: a zero weight alone would let NaN through.
    pooled = (values.masked_fill(absent, 0) * weights).sum(1)
    return rotate(rms_norm(pooled, norm, eps=eps), rope, table.positions)
