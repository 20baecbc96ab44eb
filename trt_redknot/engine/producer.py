"""Makes artifacts: one document as one segment from position zero, native routing, everything its layers produced
kept."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.contents import LAYERS_PER_GROUP, Part
from trt_redknot.config.geometry import AttentionKind
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.pool import CachePool, SequenceState
from trt_redknot.engine.prefill import Prefill
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.step import Observation
from trt_redknot.request.segments import Segment, SegmentKind


class Producer:
    """Runs one document and hands every part to the build as soon as its layer is done. Collective.

    Parts that all ranks have are written by one of them, layer groups in turn, so that ranks share the writing.
    """

    def __init__(self, context: RankContext, build: ArtifactBuild, tokens: NDArray[np.int64]) -> None:
        self._context = context
        self._build = build
        self._tokens = tokens
        self._specs = {(spec.part, spec.layer): spec for spec in build.specs}
        geometry = context.geometry
        self._groups = -(-geometry.layers // LAYERS_PER_GROUP)
        self._pool = CachePool(geometry, [len(tokens)], [1], dtype=context.dtype, device=context.device)
        csa = [layer for layer, kind in enumerate(geometry.attention_kinds) if kind is AttentionKind.CSA]
        self._observe = Observation(
            keep_local=context.profile.reusable,
            salience_layers=csa[:1],
            salience_rows=np.ones(len(tokens), dtype=bool),
            after_layer=self._keep_layer,
            before_trailing=self._keep_streams,
        )

    def run(self) -> None:
        """Fill the build; the caller publishes it."""
        context, tokens = self._context, self._tokens
        state = self._pool.sequences[0]
        state.segments = [Segment(index=0, kind=SegmentKind.PREFIX, start=0, length=len(tokens))]
        documents = Documents(
            context.geometry, state.segments, {}, local_width=context.local_width, dtype=context.dtype,
            device=context.device,
        )  # fmt: skip
        Prefill(context, self._pool, state, tokens, documents, None, self._observe).run()
        self._keep_salience()

    def _writes(self, group: int) -> bool:
        return group % self._context.collectives.size == self._context.collectives.rank

    def _add(self, part: Part, layer: int | None, tensor: torch.Tensor) -> None:
        spec = self._specs[(part, layer)]
        self._build.add(spec, tensor.reshape(spec.shape))

    def _keep_layer(self, layer: int) -> None:
        pool, state = self._pool, self._pool.sequences[0]
        if layer in self._observe.keep_local:
            self._add(Part.LOCAL, layer, torch.cat(self._observe.local.pop(layer)))
        if not self._writes(layer // LAYERS_PER_GROUP):
            return
        self._add(Part.LATENTS, layer, pool.latents[layer][: len(self._tokens)])
        ratio = self._context.geometry.ratio(layer)
        entries, index_keys = pool.entries[layer], pool.index_keys[layer]
        if entries is not None:
            self._add(Part.ENTRIES, layer, entries[: state.segments[0].entries(ratio)])
        if index_keys is not None:
            self._add(Part.INDEX_KEYS, layer, index_keys[: state.segments[0].entries(ratio)])
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
    return torch.cat([tail[positions % keep] for tail in pool.tails[layer]], dim=1)
