"""Artifacts that are made and used in one process, without a store: for benches that check reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.contents import LAYERS_PER_GROUP, Part, PartSpec, artifact_parts
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.pool import CachePool
from trt_redknot.engine.producer import Producer
from trt_redknot.engine.steps import drain
from trt_redknot.observability.events import Tier


class KeptArtifact:
    """Implements :class:`trt_redknot.engine.tiles.ArtifactReader` over tensors on the device they were made on."""

    def __init__(self, context: RankContext, specs: Sequence[PartSpec], form: ArtifactFormat) -> None:
        self.specs = tuple(specs)
        self.content_digest = "kept"
        self._context = context
        self._codecs = {spec.part: TensorCodec.of(spec, form, context.geometry) for spec in specs}
        self._stored: dict[tuple[Part, int | None], torch.Tensor] = {}

    def add(self, spec: PartSpec, tensor: torch.Tensor) -> None:
        self._stored[spec.part, spec.layer] = self.codec(spec.part).encode(tensor)

    def share(self) -> None:
        """Hand the parts that one rank made to the others. Collective."""
        collectives = self._context.collectives
        groups = -(-self._context.geometry.layers // LAYERS_PER_GROUP)
        for spec in self.specs:
            if spec.by_rank:
                continue
            writer = (groups if spec.layer is None else spec.layer // LAYERS_PER_GROUP) % collectives.size
            codec = self.codec(spec.part)
            shape = codec.stored_shape(spec.shape)
            counts = [shape[0] if rank == writer else 0 for rank in range(collectives.size)]
            own = self._stored.get((spec.part, spec.layer))
            if own is None:
                own = torch.empty((0, *shape[1:]), dtype=codec.stored_dtype, device=self._context.device)
            self._stored[spec.part, spec.layer] = collectives.all_gather(own, counts)

    def codec(self, part: Part) -> TensorCodec:
        return self._codecs[part]

    def count(self, tier: Tier, bytes: int) -> None:
        return None

    def raw(self, part: Part, layer: int | None) -> torch.Tensor:
        return self._stored[part, layer]

    def tensor(self, part: Part, layer: int | None, dtype: torch.dtype) -> torch.Tensor:
        return self.codec(part).decode(self.raw(part, layer), dtype)

    def rows(self, part: Part, layer: int | None, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = self.raw(part, layer)
        return self.codec(part).decode(stored.index_select(0, index.to(stored.device)), dtype)


def keep_artifact(context: RankContext, tokens: NDArray[np.int64], form: ArtifactFormat) -> KeptArtifact:
    """The artifact of a document, int64 [n]. Collective."""
    geometry = context.geometry
    specs = artifact_parts(geometry, context.profile, len(tokens), context.collectives.size)
    kept = KeptArtifact(context, specs, form)
    pool = CachePool(geometry, Producer.size(geometry, len(tokens)), dtype=context.dtype, device=context.device)
    producer = Producer(context, cast("ArtifactBuild", kept), tokens, pool)
    try:
        drain(producer.run())
        kept.share()
    finally:
        producer.close()
    return kept
