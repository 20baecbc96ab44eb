"""One decode step: every open sequence of the batch grows by a token, and all of them walk the layers together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trt_redknot.config.geometry import AttentionKind
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.pool import CachePool, SequenceState, tail_rows
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.step import Observation, Step, no_restore
from trt_redknot.engine.steps import drain
from trt_redknot.engine.tables import ExtraRow, ratio_tables


def decode_step(
    context: RankContext, pool: CachePool, states: Sequence[SequenceState], tokens: Sequence[int]
) -> tuple[torch.Tensor, RowSet]:
    """Append `tokens[i]` to `states[i]` and run them: own streams after the last layer, and their row set. Collective.

    Routing is native (tau = 1): generated tokens are few, and both arms decode alike.
    """
    for state in states:
        state.append_token()
    device = context.device
    rows = RowSet(
        sequences=np.arange(len(states), dtype=np.int64),
        positions=np.array([state.length - 1 for state in states], dtype=np.int64),
        full_rows=len(states),
        rank=context.collectives.rank,
        size=context.collectives.size,
        chunk_rows=context.chunk_rows,
    )
    extras: dict[int, list[ExtraRow]] = {}
    sources: dict[int, torch.Tensor] = {}
    for kind in set(context.geometry.attention_kinds) - {AttentionKind.SLIDING}:
        ratio = context.geometry.csa_ratio if kind is AttentionKind.CSA else context.geometry.hca_ratio
        extras[ratio], sources[ratio] = _kept_rows(states, tail_rows(kind, ratio), device)
    ids = torch.tensor(list(tokens), dtype=torch.int64, device=device)
    step = Step(
        rows=rows,
        tokens=ids,
        frames=torch.tensor([state.length - 1 - state.segments[-1].start for state in states], device=device),
        pool_rows=torch.tensor([state.latent_offset + state.length - 1 for state in states], device=device),
        tables=ratio_tables(context.geometry, states, rows, extras, device),
        extra_raw=lambda layer: [tail[sources[context.geometry.ratio(layer)]] for tail in pool.tails[layer]],
        restore=no_restore(context.local_width, context.dtype, device),
    )
    own = torch.from_numpy(rows.own_rows).to(device)
    streams = context.stages.embed(ids[own])
    for layer in range(context.geometry.layers):
        streams = drain(context.walk.run(layer, step, pool, streams, tau=1.0, observe=Observation()))
    return streams, rows


def _kept_rows(states: Sequence[SequenceState], keep: int, device: torch.device) -> tuple[list[ExtraRow], torch.Tensor]:
    """Raw rows kept from earlier steps: the last `keep` positions before the new token of each sequence."""
    extras, sources = [], []
    for index, state in enumerate(states):
        for position in range(max(0, state.length - 1 - keep), state.length - 1):
            extras.append(ExtraRow(sequence=index, position=position, exact=True))
            sources.append(state.slot * keep + position % keep)
    return extras, torch.tensor(sources, dtype=torch.int64, device=device)
