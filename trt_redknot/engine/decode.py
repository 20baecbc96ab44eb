"""Decoding: every sequence of a batch grows by a token, and all of them walk the layers together.

On a GPU a step is launch bound, so steps whose tensors have the same shapes are captured once as a CUDA graph, over
buffers whose addresses stay, and replayed: the host then writes a few numbers and starts one graph a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
from trt_redknot.engine.graphs import CapturedStep, capture
from trt_redknot.engine.head import ChosenRows, logits
from trt_redknot.engine.pool import CachePool, SequenceState, tail_rows
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.step import Observation, StepArrays, make_step, no_restore
from trt_redknot.engine.steps import drain
from trt_redknot.engine.tables import ExtraRow, RatioArrays, kinds_by_ratio
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.engine.walk import LayerWalk
from trt_redknot.errors import EngineError

# Shapes differ by how many sequences there are and which of them finish a window: few of them come back.
_MOST_GRAPHS = 16
# So many rows are on every rank: what spreading them would save is less than what gathering them would take.
_REPLICATED_ROWS = 16

_Key = tuple[object, ...]


class Decoder:
    """Decode steps over one pool. Routing is native (tau = 1): generated tokens are few, and both arms decode alike.

    Args:
        graphs: capture steps where that can be done.

    Attributes:
        eager_because: why no step is captured; None where steps are.
    """

    def __init__(self, context: RankContext, pool: CachePool, *, graphs: bool = True) -> None:
        self._context = context
        self._pool = pool
        self._spread = _Layers(walk=context.walk, stages=context.stages, ranks=context.collectives)
        self._replicated = _replicated(self._spread)
        self._seen: OrderedDict[_Key, CapturedStep | None] = OrderedDict()
        self._tables: tuple[int, ...] = ()
        self._warm = False
        self.eager_because = _refusal(context) if graphs else "graphs were switched off"

    @property
    def captured(self) -> int:
        """Graphs that are ready to be replayed."""
        return sum(step is not None for step in self._seen.values())

    def step(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens[i]` to `states[i]` and run them: fp32 logits [len(states), V], valid until the next step.
        Collective."""
        for state in states:
            state.append_token()
        numbers = self._numbers(states, tokens)
        if self.eager_because is not None:
            return self._run(numbers, numbers.batch.upload(self._context.device))
        self._drop_stale()
        key = (numbers.batch.layout, numbers.chosen.counts, *(arrays.tail_whole for arrays in numbers.tables.values()))
        captured = self._seen.get(key)
        if captured is None and (key in self._seen or (self._warm and self._lasting(states))):
            captured = self._capture(key, numbers)
        if captured is not None:
            self._seen.move_to_end(key)
            return captured.replay(numbers.batch)
        # What ops make once must not be made inside a graph, so the first step runs as it is, and so does the first of
        # a shape that may never come back.
        self._warm = True
        self._seen.setdefault(key, None)
        while len(self._seen) > _MOST_GRAPHS:
            self._seen.popitem(last=False)
        return self._run(numbers, numbers.batch.upload(self._context.device))

    def _lasting(self, states: Sequence[SequenceState]) -> bool:
        """Whether sequences of this length take steps of few shapes: all raw rows that are ever kept are there."""
        geometry = self._context.geometry
        most = max(tail_rows(kind, ratio) for ratio, kind in kinds_by_ratio(geometry).items())
        return all(state.length > most for state in states)

    def _capture(self, key: _Key, numbers: _StepNumbers) -> CapturedStep | None:
        try:
            self._seen[key] = capture(lambda there: self._run(numbers, there), numbers.batch, self._context.device)
        except (RuntimeError, EngineError) as error:
            # What is really wrong shows again where the step runs as it is.
            self.eager_because = f"a step could not be captured: {str(error).splitlines()[0]}"
            self._seen.clear()
            return None
        return self._seen[key]

    def _drop_stale(self) -> None:
        """A graph holds addresses; rope tables move when they grow."""
        stages = self._context.stages
        assert isinstance(stages, OpsExecutor)
        if stages.addresses != self._tables:
            self._seen.clear()
            self._tables = stages.addresses

    def _numbers(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> _StepNumbers:
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
        ids = np.asarray(tokens, dtype=np.int64)
        step = make_step(geometry, states, rows, extras, extras_kept=True)
        tables = {ratio: arrays() for ratio, arrays in step.by_ratio.items()}
        chosen = ChosenRows.of(rows, range(len(states)))
        own = [ids[rows.own_rows], ids, chosen.own, chosen.order]
        of_tables = [array for arrays in tables.values() for array in arrays.arrays()]
        return _StepNumbers(
            layers=layers, step=step, tables=tables, chosen=chosen, kept=tuple(kept),
            batch=ArrayBatch([*own, *kept.values(), *step.base(), *of_tables]),
        )  # fmt: skip

    def _run(self, numbers: _StepNumbers, there: Sequence[torch.Tensor]) -> torch.Tensor:
        """A step over tensors of the batch's layout."""
        context, pool, geometry = self._context, self._pool, self._context.geometry
        layers = numbers.layers
        tensors = iter(there)
        own_ids, ids, own, order = (next(tensors) for _ in range(4))
        sources = {ratio: next(tensors) for ratio in numbers.kept}
        base = list(islice(tensors, len(numbers.step.base())))
        tables = {
            ratio: (arrays, list(islice(tensors, len(arrays.arrays())))) for ratio, arrays in numbers.tables.items()
        }
        step = numbers.step.step(
            ids,
            base,
            tables.__getitem__,
            extra_raw=lambda layer: [tail[sources[geometry.ratio(layer)]] for tail in pool.tails[layer]],
            restore=no_restore(context.local_width, context.dtype, context.device),
        )
        streams = layers.stages.embed(own_ids)
        for layer in range(geometry.layers):
            streams = drain(layers.walk.run(layer, step, pool, streams, tau=1.0, observe=Observation()))
        gathered = layers.ranks.all_gather(streams[own], numbers.chosen.counts)
        return logits(layers.stages, context.collectives, geometry, gathered[order])


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Who walks the layers, and the ranks that rows are spread over."""

    walk: LayerWalk
    stages: StageExecutor
    ranks: Collectives


def _replicated(layers: _Layers) -> _Layers:
    """The same where all ranks hold all rows. Plans have their ranks built in: they stay as they are."""
    if layers.ranks.size == 1 or not isinstance(layers.stages, OpsExecutor):
        return layers
    ranks = ReplicatedRows(layers.ranks)
    stages = layers.stages.over(ranks)
    return _Layers(walk=layers.walk.over(stages, stages.ops), stages=stages, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class _StepNumbers:
    """One step on the host.

    Attributes:
        layers: who runs it.
        tables, kept: by ratio; ratios that keep raw rows.
        batch: tokens of own rows and of all, chosen rows, kept raw rows, what layers share, tables.
    """

    layers: _Layers
    step: StepArrays
    tables: Mapping[int, RatioArrays]
    chosen: ChosenRows
    kept: tuple[int, ...]
    batch: ArrayBatch


def _refusal(context: RankContext) -> str | None:
    """Why steps of this rank cannot be captured, if so."""
    if context.device.type != "cuda":
        return f"there are no CUDA graphs on {context.device}"
    if not isinstance(context.stages, OpsExecutor):
        return "the engine's plans are no part of a graph"
    if not context.stages.capturable:
        return "ops of the torch references wait for the device"
    if not context.collectives.capturable:
        return "collectives between these ranks cannot be captured"
    return None


def _kept_rows(states: Sequence[SequenceState], keep: int) -> tuple[list[ExtraRow], NDArray[np.int64]]:
    """Raw rows kept from earlier steps: the last `keep` positions before the new token of each sequence."""
    extras, sources = [], []
    for index, state in enumerate(states):
        for position in range(max(0, state.length - 1 - keep), state.length - 1):
            extras.append(ExtraRow(sequence=index, position=position, exact=True))
            sources.append(state.slot * keep + position % keep)
    return extras, np.array(sources, dtype=np.int64)
