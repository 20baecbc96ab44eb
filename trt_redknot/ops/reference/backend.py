"""The plain-torch backend: every op's reference, on the device its tensors live on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.ops.reference import attention, compress, hyper_connection, indexer, moe, norms, projection


class ReferenceOps:
    """Implements :class:`trt_redknot.ops.interface.Ops` over torch tensors.

    Args:
        collectives: moves rows between ranks.

    Attributes:
        capturable: whether a CUDA graph can hold every op. These wait for the device.
    """

    capturable = False

    embed = staticmethod(projection.embed)
    linear = staticmethod(projection.linear)
    linears = staticmethod(projection.linears)
    split_heads = staticmethod(projection.split_heads)
    first_rows = staticmethod(projection.first_rows)
    grouped_linear = staticmethod(projection.grouped_linear)
    restore_replace = staticmethod(projection.restore_replace)
    rms_norm = staticmethod(norms.rms_norm)
    query_norm = staticmethod(norms.query_norm)
    norm_rope_pack = staticmethod(norms.norm_rope_pack)
    turn_rows = staticmethod(norms.turn_rows)
    hyper_connection_pre = staticmethod(hyper_connection.hyper_connection_pre)
    hyper_connection_post = staticmethod(hyper_connection.hyper_connection_post)
    hyper_head = staticmethod(hyper_connection.hyper_head)
    compress = staticmethod(compress.compress)
    lightning_indexer = staticmethod(indexer.lightning_indexer)
    index_salience = staticmethod(indexer.index_salience)
    seg_latent_attention = staticmethod(attention.seg_latent_attention)
    route_learned = staticmethod(moe.route_learned)
    route_hash = staticmethod(moe.route_hash)
    experts = staticmethod(moe.experts)
    shared_expert = staticmethod(moe.shared_expert)

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def prepared(self, weights: Mapping[str, Any], *, together: Sequence[str] = ()) -> Mapping[str, Any]:
        """A layer's tensors as these ops read them: as they are."""
        return weights

    def over(self, collectives: Collectives) -> Self:
        """The same ops between other ranks, over what these prepared."""
        ops = copy.copy(self)
        ops._collectives = collectives
        return ops

    def check(self) -> None:
        """Ops raise their faults at once."""

    @staticmethod
    def write_rows(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        pool[rows] = values.to(pool.dtype)

    @staticmethod
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._collectives.all_gather(own, counts)

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self._collectives.reduce_scatter(partial, counts)
