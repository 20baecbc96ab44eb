"""Unpacking on the GPU: what the functions of the same name in `ops/reference/packing.py` give for bf16, NaN payloads
aside. One launch a tensor, on the current stream, no synchronisation."""

from __future__ import annotations

import torch

from trt_redknot.ops.cuda.attention import HEAD_DIM, ROPE_DIM
from trt_redknot.ops.cuda.elementwise import RowFormat, call_op

_CHANNELS = 8


def unpacks_latents(head_dim: int, rope_dim: int) -> bool:
    """Whether the kernel serves latents of this geometry; others take the reference."""
    return (head_dim, rope_dim) == (HEAD_DIM, ROPE_DIM)


def unpacks_rows(width: int) -> bool:
    """Whether the kernel serves plain rows of this width; others take the reference."""
    return width % _CHANNELS == 0


def unpack_latents(packed: torch.Tensor) -> torch.Tensor:
    """bf16 [n, 512] of packed latents uint8 [n, 584].

    Raises:
        EngineError: the libraries are missing, or the tensor has a dtype, shape or device that the kernel does not
            serve.
    """
    return _unpack(packed, HEAD_DIM, RowFormat.PACKED_LATENT)


def unpack_rows(packed: torch.Tensor, width: int) -> torch.Tensor:
    """bf16 [n, width] of packed plain rows, width a multiple of 8.

    Raises:
        EngineError: as above.
    """
    return _unpack(packed, width, RowFormat.PACKED_ROW)


def _unpack(packed: torch.Tensor, width: int, row_format: RowFormat) -> torch.Tensor:
    out = torch.empty((packed.shape[0], width), dtype=torch.bfloat16, device=packed.device)
    call_op("unpack", out, packed, row_format)
    return out
