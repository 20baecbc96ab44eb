"""Rows of a pool: written to scattered places as wide words, since torch moves an element a thread; and turned."""

from __future__ import annotations

import torch

from trt_redknot.ops.cuda.elementwise import call_op
from trt_redknot.ops.cuda.library import load_kernels

ROPE_DIM = 64  # that the kernel turns
# Widest first. What numbers the words are is nobody's concern: they are moved, not computed with.
_WORDS = (torch.complex128, torch.int64, torch.int32)


def write_rows(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """pool[rows] = values, in place. On a GPU nothing waits.

    Args:
        pool: [N, ...], contiguous.
        rows: int64 [R], distinct.
        values: [R, ...]; taken to the pool's dtype.
    """
    assert pool.is_contiguous(), "rows of a copy would be written"
    if rows.shape[0] == 0:
        return
    target, source = pool.flatten(1), values.to(pool.dtype).flatten(1)
    width = target.shape[1] * target.element_size()
    for word in _WORDS:
        size = word.itemsize
        if width % size == 0 and target.data_ptr() % size == 0 and source.data_ptr() % size == 0:
            target, source = target.view(word), source.view(word)
            break
    target.index_copy_(0, rows, source)


def turn_rows(rows_RD: torch.Tensor, frames_R: torch.Tensor, rope: torch.Tensor) -> None:
    """Turn the last 64 channels of bf16 rows [R, D] by the angles of the positions `frames_R`, in place, as the
    reference does. Rows at position 0 are not touched.

    Args:
        rows_RD: contiguous, 16-byte aligned.
        frames_R: int64 [R].
        rope: [positions, 32, 2]; fp32, other float dtypes are widened.

    Raises:
        EngineError: the libraries are missing, or a tensor has a dtype, shape or device that the kernel does not serve.
    """
    load_kernels()
    call_op("turn_rows", rows_RD, frames_R, rope.float())
