"""Byte-moving ops on the GPU; meaning and arguments are those of the functions of the same name in `ops/reference`.

All tensors are contiguous CUDA tensors, activations bf16; every op runs on the current stream and never synchronises.
Norm and position weights may be bf16 or fp32, rope tables are fp32. Channel counts are multiples of 8. A rope position
outside its table turns the row's rope channels to NaN: nothing is read out of range.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache

import torch

from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda.library import load_kernels
from trt_redknot.ops.reference.packing import latent_pitch, row_bytes
from trt_redknot.ops.tables import CompressTable


class RowFormat(IntEnum):
    """How an op stores its rows: bf16, or the packed rows of :mod:`trt_redknot.ops.reference.packing`."""

    BF16 = 0
    PACKED_LATENT = 1
    PACKED_ROW = 2


@cache
def _overload(name: str) -> Callable[..., None]:
    """The op itself: its packet would choose among overloads at every call."""
    load_kernels()
    overload: Callable[..., None] = getattr(torch.ops.redknot, name).default
    return overload


def call_op(name: str, *arguments: object) -> None:
    """Call `torch.ops.redknot.<name>`.

    Raises:
        EngineError: the libraries are missing, or the op refused a dtype, shape or device.
    """
    try:
        _overload(name)(*arguments)
    except RuntimeError as error:
        raise EngineError(f"{name} refused its inputs", found=str(error).splitlines()[0]) from error


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """RMS norm over the last axis of bf16 [..., C], C at most 8192, rounded once: bf16 [..., C]."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    call_op("norm_rope_pack", out, rows, weight, None, None, None, RowFormat.BF16, eps)
    return out.view(x.shape)


def query_norm(q_RHD: torch.Tensor, *, eps: float) -> torch.Tensor:
    """RMS norm of every head without weight: bf16 [R, H, D]."""
    out = torch.empty_like(q_RHD)
    call_op("norm_rope_pack", out, q_RHD, None, None, None, None, RowFormat.BF16, eps)
    return out


def norm_rope_pack(
    latents_RD: torch.Tensor,
    norm_D: torch.Tensor,
    rope: torch.Tensor,
    positions_R: torch.Tensor,
    *,
    eps: float,
    row_format: RowFormat = RowFormat.BF16,
    pool: torch.Tensor | None = None,
    pool_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Latents bf16 [R, D] normed and rotated, as new rows or straight into rows of a pool.

    Args:
        row_format: BF16 [R, D], or packed uint8 [R, bytes]: the packing of the bf16 rows, bit for bit.
        pool, pool_rows: write row r to `pool[pool_rows[r]]` and return `pool`; int64 [R], rows outside the pool are
            dropped.
    """
    if (pool is None) != (pool_rows is None):
        raise EngineError("norm_rope_pack takes pool and pool_rows together", remedy="Give both or neither.")
    if pool is None:
        pool = _empty_rows(latents_RD, latents_RD.shape[0], norm_D.shape[0], 2 * rope.shape[1], row_format)
    call_op("norm_rope_pack", pool, latents_RD, norm_D, rope, positions_R, pool_rows, row_format, eps)
    return pool


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm: torch.Tensor,
    rope: torch.Tensor,
    table: CompressTable,
    *,
    eps: float,
    row_format: RowFormat = RowFormat.BF16,
    pool: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entries [E, D] pooled from raw rows bf16 [rows, w * D]; with `pool`, written to `pool[table.entries]` instead."""
    rows = None if pool is None else table.entries
    if pool is None:
        pool = _empty_rows(kv, table.slots.shape[0], norm.shape[0], 2 * rope.shape[1], row_format)
    call_op("compress", pool, kv, gate, ape, norm, rope, table.slots, table.positions, rows, row_format, eps)
    return pool


def restore_replace(
    global_RZ: torch.Tensor,
    local_R1Z: torch.Tensor,
    restored: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Projected state bf16 [R, Z]: Global + Local on the first R1 rows, Global + restored on the others.

    Args:
        restored: bf16 [R - R1, Z] or packed uint8 [R - R1, bytes]; with `index` any number of rows.
        index: int64 [R - R1], row of `restored` for each row; one out of range turns its row to NaN.
    """
    out = torch.empty_like(global_RZ)
    call_op("restore_replace", out, global_RZ, local_R1Z, restored, index)
    return out


def hyper_connection_pre(
    streams_RSM: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_M: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mHC before a block: bf16 streams [R, S, M], S 2 or 4 -> (bf16 [R, M], fp32 [R, S], fp32 [R, S, S])."""
    rows, streams, hidden = streams_RSM.shape
    normed = streams_RSM.new_empty((rows, hidden))
    post = streams_RSM.new_empty((rows, streams), dtype=torch.float32)
    comb = streams_RSM.new_empty((rows, streams, streams), dtype=torch.float32)
    call_op(
        "hyper_connection_pre", normed, post, comb, streams_RSM, fn.float(), base.float(), scale.float(), norm_M,
        iterations, eps, norm_eps,
    )  # fmt: skip
    return normed, post, comb


def hyper_connection_post(
    streams_RSM: torch.Tensor,
    output_RM: torch.Tensor,
    post_RS: torch.Tensor,
    comb_RSS: torch.Tensor,
) -> torch.Tensor:
    """mHC after a block: bf16 [R, S, M], sums in fp32, rounded once."""
    out = torch.empty_like(streams_RSM)
    call_op("hyper_connection_post", out, streams_RSM, output_RM, post_RS, comb_RSS)
    return out


def hyper_head(
    streams_RSM: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_M: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    """Streams collapsed before the head, with the final norm: bf16 [R, M]."""
    normed = streams_RSM.new_empty((streams_RSM.shape[0], streams_RSM.shape[2]))
    call_op(
        "hyper_head", normed, streams_RSM, fn.float(), base.float(), scale.reshape(1).float(), norm_M, eps, norm_eps
    )
    return normed


def _empty_rows(like: torch.Tensor, rows: int, width: int, rope_dim: int, row_format: RowFormat) -> torch.Tensor:
    if row_format is RowFormat.BF16:
        return like.new_empty((rows, width))
    size = latent_pitch(width, rope_dim) if row_format is RowFormat.PACKED_LATENT else row_bytes(width)
    return like.new_empty((rows, size), dtype=torch.uint8)
