"""What a checkpoint's network looks like: sizes, the kind of every layer, rope tables. Pure data.

Shape suffixes used across the package:
    R rows (tokens that run)      N tokens of a request     D head_dim        P rope_dim
    H heads                       G output groups           C o_lora_rank     Q q_lora_rank
    M hidden                      S residual streams        E compressed entries
    X experts                     F expert width            V vocabulary      I index_dim
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property

from trt_redknot.digests import digest_json


class AttentionKind(StrEnum):
    """How a layer attends beyond its sliding window."""

    SLIDING = "sliding"
    CSA = "csa"
    HCA = "hca"


class RouterKind(StrEnum):
    """How a layer picks its routed experts."""

    HASH = "hash"
    LEARNED = "learned"


@dataclass(frozen=True, kw_only=True)
class RopeGeometry:
    """One rope table: interleaved pairs on the last `dim` channels, YaRN when `factor` is set.

    `attention_factor` multiplies cos and sin (1.0 in every released checkpoint).
    """

    theta: float
    dim: int
    factor: float | None = None
    original_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelGeometry:
    """Sizes of one DeepSeek-V4 network, validated by :func:`trt_redknot.config.parse.geometry_from_config`."""

    vocab: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    output_groups: int
    output_lora_rank: int
    window: int
    csa_ratio: int
    hca_ratio: int
    attention_kinds: tuple[AttentionKind, ...]
    router_kinds: tuple[RouterKind, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    expert_width: int
    routed_scale: float
    scoring: str
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    hc_eps: float
    norm_eps: float
    rope_sliding: RopeGeometry
    rope_compressed: RopeGeometry
    max_positions: int
    bos_token: int | None
    stop_tokens: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.attention_kinds)

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.output_groups

    @property
    def projected(self) -> int:
        """Channels of the projected state Z over all ranks: groups x o_lora_rank."""
        return self.output_groups * self.output_lora_rank

    def ratio(self, layer: int) -> int:
        """Tokens pooled into one compressed entry of `layer`; 0 where the layer has no compressor."""
        return {AttentionKind.SLIDING: 0, AttentionKind.CSA: self.csa_ratio, AttentionKind.HCA: self.hca_ratio}[
            self.attention_kinds[layer]
        ]

    @property
    def coarsest_ratio(self) -> int:
        """Tokens of the coarsest compressed entry of any layer; documents of whole multiples have the windows that
        the request would have. 1 where no layer has a compressor."""
        return max(1, *(self.ratio(layer) for layer in range(self.layers)))

    @property
    def boundary(self) -> int:
        """Rows at a document's ends that see across them at once: tokens of the sliding window or, if more, of the
        coarsest compressed entry."""
        return max(self.window, self.coarsest_ratio)

    def rope(self, layer: int) -> RopeGeometry:
        return self.rope_sliding if self.attention_kinds[layer] is AttentionKind.SLIDING else self.rope_compressed

    @cached_property
    def digest(self) -> str:
        return digest_json(asdict(self))
