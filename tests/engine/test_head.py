"""Logits of chosen rows, whichever ranks own them and in whatever order they are asked for."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.artifacts.support import GEOMETRY, together
from trt_redknot.collectives import Collectives
from trt_redknot.engine.executor import OpsExecutor
from trt_redknot.engine.head import logits_of
from trt_redknot.engine.rowset import RowSet
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.partition import even_split

NETWORK = dataclasses.replace(GEOMETRY, vocab=13, hidden=16)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 2, 3, 8]))
def test_every_rank_gets_the_chosen_rows_in_order(seed: int, size: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, chunk_rows = draw.randrange(1, 20), draw.randrange(1, 20)
    chosen = [draw.randrange(count) for _ in range(draw.randrange(1, 8))]
    streams_n, hidden = NETWORK.streams, NETWORK.hidden

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    streams, head = values(count, streams_n, hidden), values(NETWORK.vocab, hidden)
    shared = {
        "hc_head.fn": values(streams_n, streams_n * hidden),
        "hc_head.base": values(streams_n),
        "hc_head.scale": values(1),
        "norm": values(hidden),
    }

    def work(ranks: Collectives) -> torch.Tensor:
        rows = RowSet(
            sequences=np.arange(count), positions=np.arange(count), full_rows=count, rank=ranks.rank, size=ranks.size,
            chunk_rows=chunk_rows,
        )  # fmt: skip
        part = even_split(NETWORK.vocab, ranks.size)[ranks.rank]
        weights = {**shared, "head": head[part.start : part.stop]}
        own = streams[torch.from_numpy(rows.own_rows)]
        stages = OpsExecutor(NETWORK, (), weights, {}, ReferenceOps(ranks))
        return logits_of(stages, ranks, NETWORK, own, rows, chosen)

    (whole,) = together(1, work)
    assert isinstance(whole, torch.Tensor), whole
    assert whole.shape == (len(chosen), NETWORK.vocab)
    assert len({tuple(row.tolist()) for row in whole}) == len(set(chosen))
    for found in together(size, work):
        assert isinstance(found, torch.Tensor), found
        torch.testing.assert_close(found, whole, atol=1e-6, rtol=0)
