"""Makes artifacts: one document as one segment from position zero, native routing, everything its layers produced
kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.contents import LAYERS_PER_GROUP, Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.pool import CachePool, PoolRows, SequenceState
from trt_redknot.engine.prefill import Prefill
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.step import Observation
from trt_redknot.engine.steps import Steps
from trt_redknot.request.segments import Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class Produced:
    """An artifact that is in the store; `built` is False where it was there already."""

    artifact_id: str
    built: bool


class Producer:
    """Runs one document and hands every part to the build as soon as its layer is done. Collective.

    Parts that all ranks have are written by one of them, layer groups in turn, so that ranks share the writing.

    Args:
        pool: has room for the document: :meth:`size`.
        tokens: int64 [n], the document.
    """

    def __init__(self, context: RankContext, build: ArtifactBuild, tokens: NDArray[np.int64], pool: CachePool) -> None:
        self._context = context
        self._build = build
        self._tokens = tokens
        self._specs = {(spec.part, spec.layer): spec for spec in build.specs}
        geometry = context.geometry
        self._groups = -(-geometry.layers // LAYERS_PER_GROUP)
        self._pool = pool
        document = Segment(index=0, kind=SegmentKind.PREFIX, start=0, length=len(tokens))
        self._state = pool.open(self.size(geometry, len(tokens)), [document])
        csa = [layer for layer, kind in enumerate(geometry.attention_kinds) if kind is AttentionKind.CSA]
        self._observe = Observation(
            keep_local=context.profile.reusable,
            salience_layers=csa[:1],
            salience_rows=np.ones(len(tokens), dtype=bool),
            after_layer=self._keep_layer,
            before_trailing=self._keep_streams,
        )

    @staticmethod
    def size(geometry: ModelGeometry, tokens: int) -> PoolRows:
        """Pool rows that a document of this length takes while it runs."""
        return PoolRows.of_sequence(geometry, tokens, 1)

    def run(self) -> Steps[None]:
        """Fill the build, in steps; the caller publishes it, and closes the producer however this ends."""
        context, tokens = self._context, self._tokens
        documents = Documents(
            context.geometry, self._state.segments, {}, local_width=context.local_width, dtype=context.dtype,
            device=context.device,
        )  # fmt: skip
        yield from Prefill(context, self._pool, self._state, tokens, documents, None, self._observe).run()
        self._keep_salience()

    def close(self) -> None:
        """Give the pool rows back."""
        self._pool.close(self._state)
        # It holds this object, which holds the pool and the rank's weights: both go when the caller lets go.
        self._observe = Observation()

    def _writes(self, group: int) -> bool:
        return group % self._context.collectives.size == self._context.collectives.rank

    def _add(self, part: Part, layer: int | None, tensor: torch.Tensor) -> None:
        spec = self._specs[(part, layer)]
        self._build.add(spec, tensor.reshape(spec.shape))

    def _keep_layer(self, layer: int) -> None:
        pool, state = self._pool, self._state
        if layer in self._observe.keep_local:
            self._add(Part.LOCAL, layer, torch.cat(self._observe.local.pop(layer)))
        if not self._writes(layer // LAYERS_PER_GROUP):
            return
        latents = pool.latents[layer][state.latent_offset :][: len(self._tokens)]
        self._add(Part.LATENTS, layer, pool.rows.values(Part.LATENTS, latents))
        ratio = self._context.geometry.ratio(layer)
        entries, index_keys = pool.entries[layer], pool.index_keys[layer]
        count = state.segments[0].entries(ratio)
        if entries is not None:
            rows = entries[state.entry_offsets[ratio] :][:count]
            self._add(Part.ENTRIES, layer, pool.rows.values(Part.ENTRIES, rows))
        if index_keys is not None:
            rows = index_keys[state.entry_offsets[ratio] :][:count]
            self._add(Part.INDEX_KEYS, layer, pool.rows.values(Part.INDEX_KEYS, rows))
            self._add(Part.BOUNDARY, layer, _last_raw_rows(pool, state, layer, ratio))

    def _keep_streams(self, streams: torch.Tensor, rows: RowSet) -> None:
        gathered = [self._context.collectives.all_gather(streams[chunk.own], chunk.counts) for chunk in rows.chunks]
        if self._writes(self._groups):
            self._add(Part.STREAMS, None, torch.cat(gathered))

    def _keep_salience(self) -> None:
        if not self._writes(self._groups):
            return
        if self._observe.salience is None:
            mean = torch.zeros(0)
        else:
            total, seen = self._observe.salience
            mean = total / seen.clamp(min=1)
        self._add(Part.SALIENCE, None, mean)


def _last_raw_rows(pool: CachePool, state: SequenceState, layer: int, ratio: int) -> torch.Tensor:
    """Raw projections of the document's last rows, in order: [min(n, ratio), 4 D + 4 I]."""
    keep = 2 * ratio
    positions = torch.arange(max(0, state.length - ratio), state.length)
    rows = state.slot * keep + positions % keep
    return torch.cat([tail[rows] for tail in pool.tails[layer]], dim=1)
