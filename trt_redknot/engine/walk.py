"""Walks a row set through layers, stage by stage and chunk by chunk, over the stages of a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.config.geometry import ModelGeometry, RouterKind
from trt_redknot.engine.executor import StageExecutor
from trt_redknot.engine.pool import CachePool
from trt_redknot.engine.step import Observation, PartTables, Step, StepPart
from trt_redknot.engine.steps import Steps
from trt_redknot.engine.tables import RatioTables
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.model.layers import Projected
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops
from trt_redknot.ops.tables import CompressTable
from trt_redknot.partition import even_split


class LayerWalk:
    """Runs layers over row sets. Holds what never changes: geometry, stages, ops.

    Args:
        stages: computes; holds this rank's weights.
        ops: moves rows between ranks and into the pool.
        first_expert: id of the first expert this rank holds.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        stages: StageExecutor,
        ops: Ops,
        *,
        first_expert: int,
    ) -> None:
        self._geometry = geometry
        self._stages = stages
        self._ops = ops
        self._first_expert = first_expert

    def over(self, stages: StageExecutor, ops: Ops) -> LayerWalk:
        """The same layers by other stages and ops."""
        return LayerWalk(self._geometry, stages, ops, first_expert=self._first_expert)

    def run(
        self, layer: int, step: Step, pool: CachePool, streams: torch.Tensor, *, tau: float, observe: Observation
    ) -> Steps[torch.Tensor]:
        """One layer over own streams [own rows, S, M]; the pool's rows of the step are written.

        Stops after each chunk's projection and after each chunk's attention.
        """
        spec = LayerSpec(geometry=self._geometry, layer=layer, tau=tau, first_expert=self._first_expert)
        ratio = self._geometry.ratio(layer)
        projected = yield from self._project(spec, step, pool, streams)
        _, cut = step.of_ratio(ratio)
        if layer in observe.salience_layers:
            self._salience(spec, step, pool, projected, ratio, observe)
            if observe.after_salience is not None and observe.salience is not None:
                observe.after_salience(layer, observe.salience[0])
        counted = layer in observe.fanout_layers and spec.router is RouterKind.LEARNED
        whole = len(step.parts) == 1
        outputs = streams if whole else torch.empty_like(streams)
        for part, own, keys in zip(step.parts, projected, cut, strict=True):
            partial = self._attend(spec, step, pool, part, own, keys, observe)
            own_streams = streams if whole else streams[part.chunk.own]
            mixed, ids = self._stages.mix(spec, own_streams, own, partial, part.tokens, part.chunk.counts)
            if whole:
                outputs = mixed
            else:
                outputs[part.chunk.own] = mixed
            if counted:
                observe.expert_ids.append(ids)
            yield
        return outputs

    def _project(self, spec: LayerSpec, step: Step, pool: CachePool, streams: torch.Tensor) -> Steps[list[Projected]]:
        ops, layer = self._ops, spec.layer
        projected = []
        raw: list[list[torch.Tensor]] = [[] for _ in pool.tails[layer]]
        for part in step.parts:
            chunk = part.chunk
            own = self._stages.project(spec, streams[chunk.own], part.positions)
            ops.write_rows(pool.latents[layer], part.pool_rows, ops.all_gather(own.latent, chunk.counts))
            for collected, rows in zip(raw, own.raw, strict=True):
                collected.append(ops.all_gather(rows, chunk.counts))
            projected.append(own)
            yield
        # The host makes the tables of a ratio when a layer first needs them: by now the device has work.
        tables, _ = step.of_ratio(self._geometry.ratio(layer))
        if tables.compress is not None:
            self._compress(spec, step, pool, raw, tables, tables.compress)
        return projected

    def _compress(
        self,
        spec: LayerSpec,
        step: Step,
        pool: CachePool,
        raw: list[list[torch.Tensor]],
        tables: RatioTables,
        table: CompressTable,
    ) -> None:
        layer = spec.layer
        entries = pool.entries[layer]
        assert entries is not None
        joined = []
        if not tables.extras_kept or table.entries.shape[0]:
            extras = step.extra_raw(layer)
            joined = [_joined([extra, *rows]) for extra, rows in zip(extras, raw, strict=True)]
            self._stages.compress(spec, joined, table, entries, pool.index_keys[layer])
        # Where the extra rows are kept already, the step's own are looked at alone.
        kept = [_joined(rows) for rows in raw] if tables.extras_kept else joined
        for tail, rows in zip(pool.tails[layer], kept, strict=True):
            self._ops.write_rows(tail, tables.tail_targets, rows if tables.tail_whole else rows[tables.tail_sources])

    def _attend(
        self,
        spec: LayerSpec,
        step: Step,
        pool: CachePool,
        part: StepPart,
        own: Projected,
        keys: PartTables,
        observe: Observation,
    ) -> torch.Tensor:
        layer, chunk = spec.layer, part.chunk
        selected = None
        index_keys = pool.index_keys[layer]
        if index_keys is not None:
            selected = self._stages.select(spec, own, index_keys, keys.own, chunk.counts)
        full = step.rows.full_in(chunk)
        restored = step.restore(layer, chunk)
        assert restored.shape[0] == chunk.rows.stop - chunk.rows.start - full
        tap = observe.local.setdefault(layer, []).append if layer in observe.keep_local else None
        query_latent = self._ops.all_gather(own.query_latent, chunk.counts)
        return self._stages.attend(
            spec, query_latent, full, keys.rows, pool.latents[layer], pool.entries[layer], selected, restored,
            tap=tap,
        )  # fmt: skip

    def _salience(
        self,
        spec: LayerSpec,
        step: Step,
        pool: CachePool,
        projected: list[Projected],
        ratio: int,
        observe: Observation,
    ) -> None:
        """Sum the Indexer scores of the asked rows, which all ranks share evenly whoever owns them; every rank adds the
        partial sums in the same order."""
        assert observe.salience_rows is not None
        index_keys = pool.index_keys[spec.layer]
        assert index_keys is not None, "salience is asked of CSA layers only"
        tables, cut = step.of_ratio(ratio)
        entries = tables.entry_count
        sums = [torch.zeros(2, entries, dtype=torch.float64, device=index_keys.device)]
        for part, own, keys in zip(step.parts, projected, cut, strict=True):
            asked = observe.salience_rows[part.chunk.rows]
            if not asked.any():
                continue
            shared, rows = self._share(own, asked, part, step.rows.rank)
            total, seen = self._stages.salience(
                spec, shared, rows.inside, index_keys, keys.rows.rows(rows.of_chunk), entries
            )
            sums.append(torch.stack((total, seen)).double())
        mine = torch.stack(sums).sum(0)
        everyone = self._ops.all_gather(mine.unsqueeze(0), [1] * step.rows.size).sum(0)
        if observe.salience is None:
            observe.salience = (everyone[0], everyone[1])
        else:
            observe.salience = (observe.salience[0] + everyone[0], observe.salience[1] + everyone[1])

    def _share(self, own: Projected, asked: NDArray[np.bool_], part: StepPart, rank: int) -> tuple[Projected, _Share]:
        """This rank's even share of the asked rows of a chunk. Rows that few ranks own meet on all of them first."""
        device = own.query_latent.device
        counts = part.chunk.counts
        owned = np.split(asked, np.cumsum(counts)[:-1])
        wanted = [int(mask.sum()) for mask in owned]
        mine = np.flatnonzero(owned[rank])
        if max(wanted) - min(wanted) <= 1:
            start = sum(counts[:rank])
            inside, of_chunk = ArrayBatch([mine, start + mine]).upload(device)
            return own, _Share(inside=inside, of_chunk=of_chunk)
        assert own.index_weights is not None
        share = even_split(sum(wanted), len(counts))[rank]
        everywhere = np.flatnonzero(asked)[share.start : share.stop]
        sent, inside, of_chunk = ArrayBatch([mine, np.arange(share.start, share.stop), everywhere]).upload(device)
        gathered = dataclasses.replace(
            own,
            query_latent=self._ops.all_gather(own.query_latent[sent], wanted),
            index_weights=self._ops.all_gather(own.index_weights[sent], wanted),
        )
        return gathered, _Share(inside=inside, of_chunk=of_chunk)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """Rows of a chunk: their places in what was projected, and in the chunk. int64 [k]."""

    inside: torch.Tensor
    of_chunk: torch.Tensor


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    there = [piece for piece in pieces if piece.shape[0]] or [pieces[0]]
    return there[0] if len(there) == 1 else torch.cat(there)
