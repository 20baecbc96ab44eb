"""Walks a row set through layers, stage by stage and chunk by chunk, over the stages of a layer."""

from __future__ import annotations

import numpy as np
import torch

from trt_redknot.config.geometry import ModelGeometry, RouterKind
from trt_redknot.engine.executor import StageExecutor
from trt_redknot.engine.pool import CachePool
from trt_redknot.engine.rowset import Chunk
from trt_redknot.engine.step import Observation, Step
from trt_redknot.engine.steps import Steps
from trt_redknot.engine.tables import RatioTables
from trt_redknot.model.layers import Projected
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops


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

    def run(
        self, layer: int, step: Step, pool: CachePool, streams: torch.Tensor, *, tau: float, observe: Observation
    ) -> Steps[torch.Tensor]:
        """One layer over own streams [own rows, S, M]; the pool's rows of the step are written.

        Stops after each chunk's projection and after each chunk's attention.
        """
        spec = LayerSpec(geometry=self._geometry, layer=layer, tau=tau, first_expert=self._first_expert)
        tables = step.tables[self._geometry.ratio(layer)]
        projected = yield from self._project(spec, step, pool, streams, tables)
        if layer in observe.salience_layers:
            self._salience(spec, step, pool, projected, tables, observe)
        outputs = torch.empty_like(streams)
        for chunk, own in zip(step.rows.chunks, projected, strict=True):
            partial = self._attend(spec, step, pool, chunk, own, tables, observe)
            outputs[chunk.own], ids = self._stages.mix(
                spec, streams[chunk.own], own, partial, step.tokens[chunk.own_rows], chunk.counts
            )
            if layer in observe.fanout_layers and spec.router is RouterKind.LEARNED:
                # Not bincount: on a GPU it waits for the largest value.
                fanouts = torch.arange(self._geometry.experts_per_token + 1, device=ids.device)
                counts = ((ids >= 0).sum(1, keepdim=True) == fanouts).sum(0)
                observe.fanout = counts if observe.fanout is None else observe.fanout + counts
            yield
        return outputs

    def _project(
        self, spec: LayerSpec, step: Step, pool: CachePool, streams: torch.Tensor, tables: RatioTables
    ) -> Steps[list[Projected]]:
        ops, layer = self._ops, spec.layer
        projected = []
        raw: list[list[torch.Tensor]] = [[extra] for extra in step.extra_raw(layer)]
        for chunk in step.rows.chunks:
            own = self._stages.project(spec, streams[chunk.own], step.frames[chunk.own_rows])
            ops.write_rows(pool.latents[layer], step.pool_rows[chunk.rows], ops.all_gather(own.latent, chunk.counts))
            for collected, rows in zip(raw, own.raw, strict=True):
                collected.append(ops.all_gather(rows, chunk.counts))
            projected.append(own)
            yield
        if tables.compress is not None:
            entries = pool.entries[layer]
            assert entries is not None
            joined = [torch.cat(rows) for rows in raw]
            self._stages.compress(spec, joined, tables.compress, entries, pool.index_keys[layer])
            for tail, rows in zip(pool.tails[layer], joined, strict=True):
                ops.write_rows(tail, tables.tail_targets, rows[tables.tail_sources])
        return projected

    def _attend(
        self,
        spec: LayerSpec,
        step: Step,
        pool: CachePool,
        chunk: Chunk,
        own: Projected,
        tables: RatioTables,
        observe: Observation,
    ) -> torch.Tensor:
        layer = spec.layer
        selected = None
        index_keys = pool.index_keys[layer]
        if index_keys is not None:
            selected = self._stages.select(spec, own, index_keys, tables.attention.rows(chunk.own_rows), chunk.counts)
        full = step.rows.full_in(chunk)
        restored = step.restore(layer, chunk)
        assert restored.shape[0] == chunk.rows.stop - chunk.rows.start - full
        tap = observe.local.setdefault(layer, []).append if layer in observe.keep_local else None
        query_latent = self._ops.all_gather(own.query_latent, chunk.counts)
        return self._stages.attend(
            spec, query_latent, full, tables.attention.rows(chunk.rows), pool.latents[layer], pool.entries[layer],
            selected, restored, tap=tap,
        )  # fmt: skip

    def _salience(
        self,
        spec: LayerSpec,
        step: Step,
        pool: CachePool,
        projected: list[Projected],
        tables: RatioTables,
        observe: Observation,
    ) -> None:
        """Sum the Indexer scores of the asked rows; every rank adds the partial sums in the same order."""
        assert observe.salience_rows is not None
        index_keys = pool.index_keys[spec.layer]
        assert index_keys is not None, "salience is asked of CSA layers only"
        entries = int(tables.attention.segments[:, -1].sum())
        sums = [torch.zeros(2, entries, dtype=torch.float64, device=index_keys.device)]
        for chunk, own in zip(step.rows.chunks, projected, strict=True):
            asked = torch.from_numpy(np.flatnonzero(observe.salience_rows[chunk.own_rows])).to(index_keys.device)
            total, seen = self._stages.salience(
                spec, own, asked, index_keys, tables.attention.rows(chunk.own_rows).rows(asked), entries
            )
            sums.append(torch.stack((total, seen)).double())
        mine = torch.stack(sums).sum(0)
        everyone = self._ops.all_gather(mine.unsqueeze(0), [1] * step.rows.size).sum(0)
        if observe.salience is None:
            observe.salience = (everyone[0], everyone[1])
        else:
            observe.salience = (observe.salience[0] + everyone[0], observe.salience[1] + everyone[1])
