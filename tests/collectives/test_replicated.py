"""Collectives of ranks that all hold all rows: rows stay, sums go to everybody."""

from __future__ import annotations

import pytest
import torch

from trt_redknot.collectives import LocalCollectives
from trt_redknot.collectives.replicated import ReplicatedRows


class Pair(LocalCollectives):
    """A rank whose fellow has the same rows."""

    size = 2

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return 2 * partial

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload, payload]


def test_rows_are_everywhere_and_sums_are_of_all_ranks() -> None:
    ranks = ReplicatedRows(Pair())
    rows = torch.arange(6.0).view(3, 2)
    assert (ranks.rank, ranks.size, ranks.capturable) == (0, 1, True)
    assert ranks.all_gather(rows, [3]) is rows
    assert ranks.all_to_all(rows, [3], [3]) is rows
    assert torch.equal(ranks.reduce_scatter(rows, [3]), 2 * rows)
    assert torch.equal(ranks.all_reduce(rows), 2 * rows)
    assert ranks.exchange(b"x") == [b"x", b"x"]
    ranks.barrier()


@pytest.mark.parametrize("counts", [[2], [3, 0], [1, 2]])
def test_rows_that_are_spread_are_a_mistake(counts: list[int]) -> None:
    ranks, rows = ReplicatedRows(Pair()), torch.ones(3, 2)
    with pytest.raises(AssertionError, match="3 rows against counts"):
        ranks.all_gather(rows, counts)
    with pytest.raises(AssertionError, match="3 rows against counts"):
        ranks.reduce_scatter(rows, counts)
