"""Collectives of ranks that all hold all rows: for few rows, whose gathers would take longer than their work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trt_redknot.collectives.base import Collectives

if TYPE_CHECKING:
    import torch


class ReplicatedRows:
    """Rows are on every rank already, so that gathering is nothing; sums go to all ranks. To row sets it is a group of
    one rank.

    Args:
        ranks: the ranks that hold the same rows, and between which sums are taken.
    """

    rank = 0
    size = 1

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self.capturable = ranks.capturable

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert list(counts) == [own.shape[0]], f"{own.shape[0]} rows against counts {list(counts)}"
        return own

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert list(counts) == [partial.shape[0]], f"{partial.shape[0]} rows against counts {list(counts)}"
        return self._ranks.all_reduce(partial)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_reduce(partial)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        assert list(send_counts) == list(receive_counts) == [rows.shape[0]]
        return rows

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._ranks.exchange(payload)

    def barrier(self) -> None:
        self._ranks.barrier()
