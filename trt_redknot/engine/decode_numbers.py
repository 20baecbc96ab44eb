"""The numbers of a decode step: who runs it, where its keys lie, and the one batch that carries them to the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.collectives import Collectives
from trt_redknot.collectives.replicated import ReplicatedRows
from trt_redknot.config.geometry import AttentionKind
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.executor import OpsExecutor, StageExecutor
from trt_redknot.engine.head import ChosenRows
from trt_redknot.engine.pool import SequenceState, tail_rows
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.step import ExtraRaw, Restore, Step, StepArrays, make_step
from trt_redknot.engine.tables import ExtraRow, RatioArrays, kinds_by_ratio
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.engine.walk import LayerWalk

# So many rows are on every rank: what spreading them would save is less than what gathering them would take.
_REPLICATED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Walkers:
    """Who walks the layers, and the ranks that rows are spread over."""

    walk: LayerWalk
    stages: StageExecutor
    ranks: Collectives

    @classmethod
    def of(cls, context: RankContext) -> Walkers:
        return cls(walk=context.walk, stages=context.stages, ranks=context.collectives)

    def replicated(self) -> Walkers:
        """The same where all ranks hold all rows. Plans have their ranks built in: they stay as they are."""
        if self.ranks.size == 1 or not isinstance(self.stages, OpsExecutor):
            return self
        ranks = ReplicatedRows(self.ranks)
        stages = self.stages.over(ranks)
        return Walkers(walk=self.walk.over(stages, stages.ops), stages=stages, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """One step on the host. They follow from where the rows lie, and not from their tokens.

    Attributes:
        layers: who runs it.
        tokens: int64 [R], of the rows, to be filled in before the batch leaves.
        tables, kept: by ratio; ratios that keep raw rows.
        batch: tokens, own rows, chosen rows, kept raw rows, what layers share, tables.
    """

    layers: Walkers
    step: StepArrays
    tokens: NDArray[np.int64]
    tables: Mapping[int, RatioArrays]
    chosen: ChosenRows
    kept: tuple[int, ...]
    batch: ArrayBatch

    @property
    def key(self) -> tuple[object, ...]:
        """Steps of equal keys queue the same launches over tensors of the same shapes."""
        whole = (arrays.tail_whole for arrays in self.tables.values())
        return (self.batch.layout, self.chosen.counts, *whole)

    def over(self, there: Sequence[torch.Tensor]) -> StepTensors:
        """The same numbers as tensors of the batch's layout."""
        tensors = iter(there)
        tokens, own_rows, own, order = (next(tensors) for _ in range(4))
        return StepTensors(
            tokens=tokens, own_tokens=tokens if self.layers.ranks.size == 1 else tokens[own_rows], own=own,
            order=order, sources={ratio: next(tensors) for ratio in self.kept},
            base=list(islice(tensors, len(self.step.base()))), tables=self._table_tensors(tensors),
        )  # fmt: skip

    def _table_tensors(self, tensors: Iterator[torch.Tensor]) -> dict[int, tuple[RatioArrays, list[torch.Tensor]]]:
        return {ratio: (arrays, list(islice(tensors, len(arrays.arrays())))) for ratio, arrays in self.tables.items()}


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """A step's numbers on the device, int64.

    Attributes:
        tokens, own_tokens: [R] and [own rows].
        own, order: chosen rows in the rank's own storage, and their places among the gathered ones.
        sources: by ratio, kept raw rows.
        base: what layers share.
        tables: by ratio.
    """

    tokens: torch.Tensor
    own_tokens: torch.Tensor
    own: torch.Tensor
    order: torch.Tensor
    sources: Mapping[int, torch.Tensor]
    base: Sequence[torch.Tensor]
    tables: Mapping[int, tuple[RatioArrays, Sequence[torch.Tensor]]]

    def step(self, arrays: StepArrays, *, extra_raw: ExtraRaw, restore: Restore) -> Step:
        return arrays.step(self.tokens, self.base, self.tables.__getitem__, extra_raw=extra_raw, restore=restore)


class NumbersMaker:
    """Makes the numbers of steps over one pool; a small number of rows is on every rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._spread = Walkers.of(context)
        self._replicated = self._spread.replicated()

    def make(self, states: Sequence[SequenceState]) -> StepNumbers:
        """The step of the last token of each of these sequences."""
        geometry = self._context.geometry
        layers = self._replicated if len(states) <= _REPLICATED_ROWS else self._spread
        rows = RowSet(
            sequences=np.arange(len(states), dtype=np.int64),
            positions=np.array([state.length - 1 for state in states], dtype=np.int64),
            full_rows=len(states),
            rank=layers.ranks.rank,
            size=layers.ranks.size,
            chunk_rows=self._context.chunk_rows,
        )
        extras: dict[int, list[ExtraRow]] = {}
        kept: dict[int, NDArray[np.int64]] = {}
        for ratio, kind in kinds_by_ratio(geometry).items():
            if kind is not AttentionKind.SLIDING:
                extras[ratio], kept[ratio] = _kept_rows(states, tail_rows(kind, ratio))
        tokens = np.zeros(len(states), dtype=np.int64)
        step = make_step(geometry, states, rows, extras, extras_kept=True)
        tables = {ratio: arrays() for ratio, arrays in step.by_ratio.items()}
        chosen = ChosenRows.of(rows, range(len(states)))
        own = [tokens, rows.own_rows, chosen.own, chosen.order]
        of_tables = [array for arrays in tables.values() for array in arrays.arrays()]
        return StepNumbers(
            layers=layers, step=step, tokens=tokens, tables=tables, chosen=chosen, kept=tuple(kept),
            batch=ArrayBatch([*own, *kept.values(), *step.base(), *of_tables]),
        )  # fmt: skip


def _kept_rows(states: Sequence[SequenceState], keep: int) -> tuple[list[ExtraRow], NDArray[np.int64]]:
    """Raw rows kept from earlier steps: the last `keep` positions before the new token of each sequence."""
    extras, sources = [], []
    for index, state in enumerate(states):
        for position in range(max(0, state.length - 1 - keep), state.length - 1):
            extras.append(ExtraRow(sequence=index, position=position, exact=True))
            sources.append(state.slot * keep + position % keep)
    return extras, np.array(sources, dtype=np.int64)
