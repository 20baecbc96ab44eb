"""One forward pass of a row set through consecutive layers: the tables, and where raw and restored rows come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.pool import CachePool, SequenceState
from trt_redknot.engine.rowset import Chunk, RowSet
from trt_redknot.engine.tables import (
    ExtraRow,
    RatioArrays,
    RatioTables,
    kinds_by_ratio,
    ratio_arrays,
    row_segments_of,
)
from trt_redknot.ops.tables import AttentionTable

# (layer) -> raw rows that do not run, one tensor per raw projection of the layer.
ExtraRaw = Callable[[int], Sequence[torch.Tensor]]
# (layer, chunk) -> Local contributions of the chunk's rows that do not run all heads: [rows, G * C of this rank].
Restore = Callable[[int, Chunk], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """What one chunk of a step needs: tokens and positions of its own rows, pool rows of all its rows."""

    chunk: Chunk
    tokens: torch.Tensor
    positions: torch.Tensor
    pool_rows: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PartTables:
    """Where the keys of a chunk's rows lie, and of those that the rank owns."""

    rows: AttentionTable
    own: AttentionTable


@dataclass(frozen=True, kw_only=True)
class Step:
    """What stays the same while a row set walks through layers.

    Attributes:
        tokens: int64 [R], ids.
        positions: int64 [R], in the request.
        pool_rows: int64 [R], where the pool keeps the row's latent.
        tables: by compression ratio; asked once, and kept.
        extra_raw, restore: sources of rows that do not run, or do not run all heads, in this step.
    """

    rows: RowSet
    tokens: torch.Tensor
    positions: torch.Tensor
    pool_rows: torch.Tensor
    tables: Callable[[int], RatioTables]
    extra_raw: ExtraRaw
    restore: Restore
    _by_ratio: dict[int, tuple[RatioTables, tuple[PartTables, ...]]] = field(default_factory=dict, init=False)

    @cached_property
    def parts(self) -> tuple[StepPart, ...]:
        """The step's tensors chunk by chunk: cut once, used in every layer."""
        return tuple(
            StepPart(
                chunk=chunk,
                tokens=self.tokens[chunk.own_rows],
                positions=self.positions[chunk.own_rows],
                pool_rows=self.pool_rows[chunk.rows],
            )
            for chunk in self.rows.chunks
        )

    def of_ratio(self, ratio: int) -> tuple[RatioTables, tuple[PartTables, ...]]:
        """The tables of the layers of one ratio, whole and chunk by chunk: made once, used in every layer."""
        found = self._by_ratio.get(ratio)
        if found is None:
            tables = self.tables(ratio)
            parts = tuple(
                PartTables(rows=tables.attention.rows(chunk.rows), own=tables.attention.rows(chunk.own_rows))
                for chunk in self.rows.chunks
            )
            found = self._by_ratio[ratio] = tables, parts
        return found


@dataclass(frozen=True, kw_only=True)
class StepArrays:
    """The numbers of a :class:`Step` but its tokens, on the host. They follow from where rows and segments lie.

    Attributes:
        by_ratio: those of the tables for a compression ratio.
    """

    rows: RowSet
    pool_rows: NDArray[np.int64]
    row_segments: NDArray[np.int64]
    by_ratio: Mapping[int, Callable[[], RatioArrays]]

    def base(self) -> list[NDArray[np.int64]]:
        """What layers of all ratios share."""
        return [self.pool_rows, self.rows.positions, self.row_segments]

    def step(
        self,
        tokens: torch.Tensor,
        base: Sequence[torch.Tensor],
        bring: Callable[[int], tuple[RatioArrays, Sequence[torch.Tensor]]],
        *,
        extra_raw: ExtraRaw,
        restore: Restore,
    ) -> Step:
        """The step over tensors of the same numbers.

        Args:
            tokens: int64 [R], ids of the rows.
            base: of `base`.
            bring: the arrays of a ratio, and tensors of the same numbers, when a layer first asks.
        """
        pool_rows, positions, row_segments = base

        def tables(ratio: int) -> RatioTables:
            arrays, there = bring(ratio)
            return arrays.tables(iter(there), positions=positions, row_segments=row_segments)

        return Step(
            rows=self.rows, tokens=tokens, positions=positions, pool_rows=pool_rows, tables=tables,
            extra_raw=extra_raw, restore=restore,
        )  # fmt: skip


def make_step(
    geometry: ModelGeometry,
    states: Sequence[SequenceState],
    rows: RowSet,
    extras: Mapping[int, Sequence[ExtraRow]],
    *,
    extras_kept: bool = False,
) -> StepArrays:
    """What a step is made of, on the host.

    Args:
        extras: by ratio, the raw rows that do not run in the step.
        extras_kept: they are in the pool's tails already.
    """
    pool_rows = np.empty(rows.rows, dtype=np.int64)
    for index, state in enumerate(states):
        mine = np.flatnonzero(rows.sequences == index) if len(states) > 1 else slice(None)
        pool_rows[mine] = rows.positions[mine] + state.latent_offset
    by_ratio = {
        ratio: partial(ratio_arrays, kind, ratio, states, rows, extras.get(ratio, ()), extras_kept=extras_kept)
        for ratio, kind in kinds_by_ratio(geometry).items()
    }
    return StepArrays(rows=rows, pool_rows=pool_rows, row_segments=row_segments_of(rows), by_ratio=by_ratio)


@dataclass(kw_only=True)
class Observation:
    """What a walk is asked to keep besides the streams.

    Attributes:
        keep_local: collect the online Local contribution of each layer in these layers (artifact production).
        local: by layer, chunks of [rows, G * C].
        salience_rows: bool [R] of the row set: rows whose Indexer scores are summed, in the layers of
            `salience_layers`.
        salience: sums of scores per entry, and rows that saw the entry, over all ranks.
        expert_ids: int64 [own rows, top_k] of every chunk in the layers of `fanout_layers` that choose by learning.
        after_salience: called with a layer of `salience_layers` and the sums so far once they have its scores, and
            before what is left of the layer is queued.
        after_layer: called when a layer is done and its part of the pool is final.
        before_trailing: called with the own streams that enter the trailing fence, and their rows.
    """

    keep_local: range = range(0)
    local: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    salience_layers: Sequence[int] = ()
    salience_rows: NDArray[np.bool_] | None = None
    salience: tuple[torch.Tensor, torch.Tensor] | None = None
    fanout_layers: range = range(0)
    expert_ids: list[torch.Tensor] = field(default_factory=list)
    after_salience: Callable[[int, torch.Tensor], None] | None = None
    after_layer: Callable[[int], None] | None = None
    before_trailing: Callable[[torch.Tensor, RowSet], None] | None = None

    def fanout(self) -> torch.Tensor | None:
        """Own rows by number of experts run: int64 [top_k + 1]; None where no layer counts them."""
        if not self.expert_ids:
            return None
        ran = (torch.cat(self.expert_ids) >= 0).sum(1, keepdim=True)
        # Not bincount: on a GPU it waits for the largest value.
        return (ran == torch.arange(self.expert_ids[0].shape[1] + 1, device=ran.device)).sum(0)


def no_extra_raw(pool: CachePool) -> ExtraRaw:
    """No raw rows from outside the step."""
    return lambda layer: [tail[:0] for tail in pool.tails[layer]]


def no_restore(width: int, dtype: torch.dtype, device: torch.device) -> Restore:
    """For steps in which every row runs all heads."""
    nothing = torch.empty((0, width), dtype=dtype, device=device)
    return lambda layer, chunk: nothing


class LayerRows:
    """Implements :data:`Restore`: a layer's rows are fetched once, at its first chunk, and handed out chunk by chunk.

    Args:
        fetch: all rows of a layer that do not run all heads, in the order of the row set.
    """

    def __init__(self, fetch: Callable[[int], torch.Tensor], rows: RowSet) -> None:
        self._fetch = fetch
        self._full = rows.full_rows
        self._layer = -1
        self._rows = torch.empty(0)

    def __call__(self, layer: int, chunk: Chunk) -> torch.Tensor:
        if layer != self._layer:
            self._layer, self._rows = layer, self._fetch(layer)
        return self._rows[max(0, chunk.rows.start - self._full) : max(0, chunk.rows.stop - self._full)]
