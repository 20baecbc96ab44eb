"""Rows that plans need and a request does not have. What a plan gives for them is never used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trt_redknot.ops.tables import AttentionTable


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with zeros behind it: [rows, ...]."""
    if x.shape[0] == rows:
        return x.contiguous()
    result = x.new_zeros((rows, *x.shape[1:]))
    result[: x.shape[0]] = x
    return result


def padded_table(table: AttentionTable, rows: int) -> AttentionTable:
    """A table with rows behind it that lie at the first position of the first segment and see no entry."""
    missing = rows - table.positions.shape[0]
    if not missing:
        return table
    spans = padded(table.row_segments, rows)
    spans[rows - missing :, 1] = 1
    return AttentionTable(
        segments=table.segments,
        row_segments=spans,
        positions=padded(table.positions, rows),
        visible=padded(table.visible, rows),
    )


def last_row_again(x: torch.Tensor, *, before: int, after: int) -> torch.Tensor:
    """`x` with copies of its last row before and after it; at least one row is there."""
    if not before and not after:
        return x.contiguous()
    last = x[-1:]
    return torch.cat([*[last] * before, x, *[last] * after])


def spread(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Blocks of `counts` rows, each padded to the largest, so that every rank's block begins at a multiple of it."""
    most = max(counts)
    if min(counts) == most:
        return rows.contiguous()
    return torch.cat([padded(block, most) for block in rows.split(list(counts))])


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
