"""Writing scattered rows as wide words: torch moves an element a thread, and a row has few elements of 16 bytes."""

from __future__ import annotations

import torch

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
