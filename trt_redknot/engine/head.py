"""Logits of chosen rows: their streams meet on every rank, every rank does its share of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.executor import StageExecutor
from trt_redknot.engine.rowset import RowSet
from trt_redknot.partition import even_split


def logits_of(
    stages: StageExecutor,
    collectives: Collectives,
    geometry: ModelGeometry,
    streams: torch.Tensor,
    rows: RowSet,
    chosen: Sequence[int],
) -> torch.Tensor:
    """fp32 logits [len(chosen), V] of rows of the row set, the same on every rank. Collective."""
    owners = rows.owners[list(chosen)]
    place = {int(row): index for index, row in enumerate(rows.own_rows)}
    mine = [place[row] for row in chosen if row in place]
    counts = np.bincount(owners, minlength=collectives.size).tolist()
    # Gathered in rank order; `order` puts them back as they were asked for.
    gathered = collectives.all_gather(streams[torch.tensor(mine, dtype=torch.int64, device=streams.device)], counts)
    order = np.argsort(np.argsort(owners, kind="stable"), kind="stable")
    share = stages.head(gathered[torch.from_numpy(order).to(streams.device)])
    columns = [len(part) for part in even_split(geometry.vocab, collectives.size)]
    return collectives.all_gather(share.float().T.contiguous(), columns).T.contiguous()
