"""Logits of chosen rows: their streams meet on every rank, every rank does its share of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.executor import StageExecutor
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.partition import even_split


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Rows of a row set whose logits are asked for.

    Attributes:
        own: int64 [k], those of this rank, in its own storage.
        counts: how many each rank owns.
        order: int64 [n], the places of the asked rows, in the order asked, among the rows gathered in rank order.
    """

    own: NDArray[np.int64]
    counts: tuple[int, ...]
    order: NDArray[np.int64]

    @classmethod
    def of(cls, rows: RowSet, chosen: Sequence[int]) -> ChosenRows:
        asked = np.asarray(chosen, dtype=np.int64)
        owners = rows.owners[asked]
        # Own rows ascend in the row set, and so do their places in the rank's storage.
        own = np.searchsorted(rows.own_rows, asked[owners == rows.rank])
        return cls(
            own=own,
            counts=tuple(np.bincount(owners, minlength=rows.size).tolist()),
            order=np.argsort(np.argsort(owners, kind="stable"), kind="stable"),
        )


def logits_of(
    stages: StageExecutor,
    collectives: Collectives,
    geometry: ModelGeometry,
    streams: torch.Tensor,
    rows: RowSet,
    chosen: Sequence[int],
) -> torch.Tensor:
    """fp32 logits [len(chosen), V] of rows of the row set, the same on every rank. Collective."""
    asked = ChosenRows.of(rows, chosen)
    own, order = ArrayBatch([asked.own, asked.order]).upload(streams.device)
    gathered = collectives.all_gather(streams[own], asked.counts)
    return logits(stages, collectives, geometry, gathered[order])


def logits(
    stages: StageExecutor, collectives: Collectives, geometry: ModelGeometry, streams: torch.Tensor
) -> torch.Tensor:
    """fp32 [n, V] of streams [n, S, M] that all ranks have. Collective."""
    share = stages.head(streams)
    columns = [len(part) for part in even_split(geometry.vocab, collectives.size)]
    return collectives.all_gather(share.float().T.contiguous(), columns).T.contiguous()
