"""One forward pass of a row set through consecutive layers: the tables, and where raw and restored rows come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.engine.pool import CachePool
from trt_redknot.engine.rowset import Chunk, RowSet
from trt_redknot.engine.tables import RatioTables

# (layer) -> raw rows that do not run, one tensor per raw projection of the layer.
ExtraRaw = Callable[[int], Sequence[torch.Tensor]]
# (layer, chunk) -> Local contributions of the chunk's rows that do not run all heads: [rows, G * C of this rank].
Restore = Callable[[int, Chunk], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What stays the same while a row set walks through layers.

    Attributes:
        tokens: int64 [R], ids.
        frames: int64 [R], position in the row's segment.
        tables: by compression ratio.
        extra_raw, restore: sources of rows that do not run, or do not run all heads, in this step.
    """

    rows: RowSet
    tokens: torch.Tensor
    frames: torch.Tensor
    pool_rows: torch.Tensor
    tables: dict[int, RatioTables]
    extra_raw: ExtraRaw
    restore: Restore


@dataclass(kw_only=True)
class Observation:
    """What a walk is asked to keep besides the streams.

    Attributes:
        keep_local: collect the online Local contribution of each layer in these layers (artifact production).
        local: by layer, chunks of [rows, G * C].
        salience_rows: bool [R] of the row set: rows whose Indexer scores are summed, in the layers of
            `salience_layers`.
        salience: sums of scores per entry, and rows that saw the entry, over all ranks.
        fanout: own rows by number of experts run, in the layers of `fanout_layers`: int64 [top_k + 1].
        after_layer: called when a layer is done and its part of the pool is final.
        before_trailing: called with the own streams that enter the trailing fence, and their rows.
    """

    keep_local: range = range(0)
    local: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    salience_layers: Sequence[int] = ()
    salience_rows: NDArray[np.bool_] | None = None
    salience: tuple[torch.Tensor, torch.Tensor] | None = None
    fanout_layers: range = range(0)
    fanout: torch.Tensor | None = None
    after_layer: Callable[[int], None] | None = None
    before_trailing: Callable[[torch.Tensor, RowSet], None] | None = None


def no_extra_raw(pool: CachePool) -> ExtraRaw:
    """No raw rows from outside the step."""
    return lambda layer: [tail[:0] for tail in pool.tails[layer]]


def no_restore(width: int, dtype: torch.dtype, device: torch.device) -> Restore:
    """For steps in which every row runs all heads."""
    nothing = torch.empty((0, width), dtype=dtype, device=device)
    return lambda layer, chunk: nothing
