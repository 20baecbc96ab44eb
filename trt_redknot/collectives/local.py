"""Collectives of a group of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class LocalCollectives:
    """One rank: every collective returns what it was given."""

    rank = 0
    size = 1
    capturable = True

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert list(counts) == [own.shape[0]], f"{own.shape[0]} rows against counts {list(counts)}"
        return own

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert list(counts) == [partial.shape[0]], f"{partial.shape[0]} rows against counts {list(counts)}"
        return partial

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        assert list(send_counts) == list(receive_counts) == [rows.shape[0]]
        return rows

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload]

    def barrier(self) -> None:
        return None
