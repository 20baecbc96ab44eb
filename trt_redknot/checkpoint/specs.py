"""The tensors of a network by canonical name: shape, how they may be stored, what a rank owns of them.

Shape letters are those of :mod:`trt_redknot.config.geometry`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.errors import CheckpointError
from trt_redknot.partition import even_split


class Storage(StrEnum):
    """How a tensor may be stored, and what it becomes.

    EXACT: plain floats, loaded as fp32 whatever the engine's dtype. MATRIX: plain or FP8 blocks, loaded as the engine's
    dtype. EXPERTS: the same or FP4 blocks. TABLE: integers, loaded as int32.
    """

    EXACT = "exact"
    MATRIX = "matrix"
    EXPERTS = "experts"
    TABLE = "table"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor as the engine sees it.

    Attributes:
        name: canonical name without its layer.
        shape: full shape, over all ranks.
        axis: the axis that is split over ranks; None where every rank holds the whole.
        parts: units (heads, groups, experts, rows) along `axis`; ranks own whole units.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    axis: int | None = None
    parts: int = 1

    def owned(self, tp_rank: int, tp_size: int) -> range:
        """Indices along `axis` that a rank owns; along axis 0, all of them, where nothing is split."""
        if self.axis is None:
            return range(self.shape[0])
        unit = self.shape[self.axis] // self.parts
        units = even_split(self.parts, tp_size)[tp_rank]
        return range(units.start * unit, units.stop * unit)

    def local_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """Shape of what a rank owns."""
        axis = self.axis or 0
        return (*self.shape[:axis], len(self.owned(tp_rank, tp_size)), *self.shape[axis + 1 :])

    def loaded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype after loading into an engine that computes in `dtype`."""
        if self.storage is Storage.TABLE:
            return torch.int32
        return torch.float32 if self.storage is Storage.EXACT else dtype

    def loaded_bytes(self, tp_rank: int, tp_size: int, dtype: torch.dtype) -> int:
        return math.prod(self.local_shape(tp_rank, tp_size)) * self.loaded_dtype(dtype).itemsize


def layer_specs(geometry: ModelGeometry, layer: int) -> tuple[TensorSpec, ...]:
    """Tensors of one layer, names without the `layers.<i>.` prefix."""
    return (
        *_hyper_connection("attn_hc", geometry),
        *_attention(geometry),
        *_compressor(geometry, layer),
        *_hyper_connection("ffn_hc", geometry),
        *_feed_forward(geometry, layer),
    )


def shared_specs(geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    """Tensors outside the layers."""
    g = geometry
    return (
        _matrix("embed", g.vocab, g.hidden),
        _matrix("head", g.vocab, g.hidden, axis=0, parts=g.vocab),
        _exact("norm", g.hidden),
        _exact("hc_head.fn", g.streams, g.streams * g.hidden),
        _exact("hc_head.base", g.streams),
        _exact("hc_head.scale", 1),
    )


def rank_bytes(geometry: ModelGeometry, tp_rank: int, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes of all weights that a rank holds once loaded as `dtype`; needs no checkpoint.

    Raises:
        CheckpointError: `tp_rank` and `tp_size` do not fit the network.
    """
    check_parallelism(geometry, tp_rank, tp_size)
    specs = list(shared_specs(geometry))
    for layer in range(geometry.layers):
        specs.extend(layer_specs(geometry, layer))
    return sum(spec.loaded_bytes(tp_rank, tp_size, dtype) for spec in specs)


def check_parallelism(geometry: ModelGeometry, tp_rank: int, tp_size: int) -> None:
    """Raise CheckpointError unless `tp_size` ranks can share the output groups and `tp_rank` is one of them."""
    groups = geometry.output_groups
    if tp_size < 1 or groups % tp_size:
        allowed = [size for size in range(1, groups + 1) if groups % size == 0]
        raise CheckpointError(
            "the number of ranks does not divide the network's output groups",
            expected=f"one of {allowed}",
            found=tp_size,
            remedy="Start the job with one of these numbers of ranks.",
        )
    if not 0 <= tp_rank < tp_size:
        raise CheckpointError("the rank is outside its group", expected=f"0 to {tp_size - 1}", found=tp_rank)


def _exact(name: str, *shape: int, axis: int | None = None, parts: int = 1) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, storage=Storage.EXACT, axis=axis, parts=parts)


def _matrix(name: str, *shape: int, axis: int | None = None, parts: int = 1) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, storage=Storage.MATRIX, axis=axis, parts=parts)


def _hyper_connection(name: str, geometry: ModelGeometry) -> tuple[TensorSpec, ...]:
    rows = (2 + geometry.streams) * geometry.streams
    return (
        _exact(f"{name}.fn", rows, geometry.streams * geometry.hidden),
        _exact(f"{name}.base", rows),
        _exact(f"{name}.scale", 3),
    )


def _attention(g: ModelGeometry) -> tuple[TensorSpec, ...]:
    group_width = g.heads_per_group * g.head_dim
    return (
        _exact("attn_norm", g.hidden),
        _matrix("attn.q_a", g.q_lora_rank, g.hidden),
        _exact("attn.q_norm", g.q_lora_rank),
        _matrix("attn.q_b", g.heads * g.head_dim, g.q_lora_rank, axis=0, parts=g.heads),
        _matrix("attn.kv", g.head_dim, g.hidden),
        _exact("attn.kv_norm", g.head_dim),
        _exact("attn.sinks", g.heads, axis=0, parts=g.heads),
        _matrix("attn.o_a", g.output_groups, g.output_lora_rank, group_width, axis=0, parts=g.output_groups),
        _matrix("attn.o_b", g.hidden, g.projected, axis=1, parts=g.output_groups),
    )


def _compressor(g: ModelGeometry, layer: int) -> tuple[TensorSpec, ...]:
    kind = g.attention_kinds[layer]
    if kind is AttentionKind.SLIDING:
        return ()
    ratio = g.ratio(layer)
    width = (2 if kind is AttentionKind.CSA else 1) * g.head_dim
    compressor = (
        _matrix("compressor.kv", width, g.hidden),
        _matrix("compressor.gate", width, g.hidden),
        _exact("compressor.ape", ratio, width),
        _exact("compressor.norm", g.head_dim),
    )
    if kind is AttentionKind.HCA:
        return compressor
    return (
        *compressor,
        _matrix("indexer.kv", 2 * g.index_dim, g.hidden),
        _matrix("indexer.gate", 2 * g.index_dim, g.hidden),
        _exact("indexer.ape", ratio, 2 * g.index_dim),
        _exact("indexer.norm", g.index_dim),
        _matrix("indexer.q_b", g.index_heads * g.index_dim, g.q_lora_rank),
        _matrix("indexer.weights", g.index_heads, g.hidden),
    )


def _feed_forward(g: ModelGeometry, layer: int) -> tuple[TensorSpec, ...]:
    if g.router_kinds[layer] is RouterKind.HASH:
        choice = TensorSpec(name="router.tid2eid", shape=(g.vocab, g.experts_per_token), storage=Storage.TABLE)
    else:
        choice = _exact("router.bias", g.experts)
    return (
        _exact("ffn_norm", g.hidden),
        _matrix("router.weight", g.experts, g.hidden),
        choice,
        _experts("experts.gate_up", g.experts, 2 * g.expert_width, g.hidden),
        _experts("experts.down", g.experts, g.hidden, g.expert_width),
        _matrix("shared.gate", g.expert_width, g.hidden),
        _matrix("shared.up", g.expert_width, g.hidden),
        _matrix("shared.down", g.hidden, g.expert_width),
    )


def _experts(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, storage=Storage.EXPERTS, axis=0, parts=shape[0])
