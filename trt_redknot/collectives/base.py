"""The collectives a tensor-parallel engine needs, as one small interface that is handed in and never looked up.

Every method is collective: all ranks call it, in the same order. Row counts may differ between ranks and may be zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Collectives(Protocol):
    """Data moves as tensors (all_gather, reduce_scatter, all_reduce, all_to_all), control as bytes (exchange).

    Attributes:
        capturable: a CUDA graph can hold what moves tensors on a GPU.
    """

    rank: int
    size: int
    capturable: bool

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Rows of all ranks in rank order: [counts[rank], ...] -> [sum(counts), ...]."""
        ...

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Sum over ranks of [sum(counts), ...]; this rank's rows of it: [counts[rank], ...]."""
        ...

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, same shape on all."""
        ...

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Move rows between owners: `rows` [sum(send_counts), ...] holds what goes to rank 0, then 1, ...; the result
        [sum(receive_counts), ...] holds what came from rank 0, then 1, ..."""
        ...

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order. Small control messages only."""
        ...

    def barrier(self) -> None: ...
