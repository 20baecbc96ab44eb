"""What an artifact holds: names and shapes of its tensors (docs/artifact-format.md). One definition for all sides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.profile import SplitProfile

LAYERS_PER_GROUP = 4


class Part(StrEnum):
    """Tensors of an artifact. LOCAL is stored by rank, the others once."""

    LATENTS = "latents"
    ENTRIES = "entries"
    INDEX_KEYS = "index_keys"
    BOUNDARY = "boundary"
    LOCAL = "local"
    STREAMS = "streams"
    SALIENCE = "salience"


@dataclass(frozen=True, kw_only=True)
class PartSpec:
    """One tensor: `layer` is None for the parts that belong to no layer (STREAMS, SALIENCE)."""

    part: Part
    layer: int | None
    shape: tuple[int, ...]

    @property
    def by_rank(self) -> bool:
        return self.part is Part.LOCAL


def artifact_parts(geometry: ModelGeometry, profile: SplitProfile, tokens: int, tp_size: int) -> tuple[PartSpec, ...]:
    """Every tensor one rank writes or shares for a document of `tokens` tokens, in layer order."""
    specs = []
    for layer, kind in enumerate(geometry.attention_kinds):
        specs.append(PartSpec(part=Part.LATENTS, layer=layer, shape=(tokens, geometry.head_dim)))
        if kind is not AttentionKind.SLIDING:
            entries = -(-tokens // geometry.ratio(layer))
            specs.append(PartSpec(part=Part.ENTRIES, layer=layer, shape=(entries, geometry.head_dim)))
            if kind is AttentionKind.CSA:
                specs.append(PartSpec(part=Part.INDEX_KEYS, layer=layer, shape=(entries, geometry.index_dim)))
                width = 4 * geometry.head_dim + 4 * geometry.index_dim
                rows = min(tokens, geometry.csa_ratio)
                specs.append(PartSpec(part=Part.BOUNDARY, layer=layer, shape=(rows, width)))
        if layer in profile.reusable:
            local = geometry.projected // tp_size
            specs.append(PartSpec(part=Part.LOCAL, layer=layer, shape=(tokens, local)))
    specs.append(PartSpec(part=Part.STREAMS, layer=None, shape=(tokens, geometry.streams, geometry.hidden)))
    entries = -(-tokens // geometry.csa_ratio) if AttentionKind.CSA in geometry.attention_kinds else 0
    specs.append(PartSpec(part=Part.SALIENCE, layer=None, shape=(entries,)))
    return tuple(specs)
