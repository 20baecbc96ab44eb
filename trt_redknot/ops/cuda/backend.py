"""The torch backend on a GPU: our kernels where they serve the geometry and dtype, the references for the rest."""

from __future__ import annotations

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.ops.cuda import attention, elementwise, indexer, moe
from trt_redknot.ops.reference.backend import ReferenceOps


class CudaOps(ReferenceOps):
    """Implements :class:`trt_redknot.ops.interface.Ops` over bf16 CUDA tensors.

    Args:
        geometry: decides once which kernels can serve; the answer does not change from call to call.

    Raises:
        EngineError: the kernel library was not built (at the first op).
    """

    rms_norm = staticmethod(elementwise.rms_norm)
    query_norm = staticmethod(elementwise.query_norm)
    norm_rope_pack = staticmethod(elementwise.norm_rope_pack)
    compress = staticmethod(elementwise.compress)
    restore_replace = staticmethod(elementwise.restore_replace)
    hyper_connection_pre = staticmethod(elementwise.hyper_connection_pre)
    hyper_connection_post = staticmethod(elementwise.hyper_connection_post)
    hyper_head = staticmethod(elementwise.hyper_head)
    route_learned = staticmethod(moe.route_learned)
    route_hash = staticmethod(moe.route_hash)
    experts = staticmethod(moe.experts)

    def __init__(self, collectives: Collectives, geometry: ModelGeometry) -> None:
        super().__init__(collectives)
        g = geometry
        if attention.attention_supported(g.head_dim, g.rope_dim, g.index_topk, torch.bfloat16):
            self.seg_latent_attention = attention.seg_latent_attention
        if indexer.indexer_supported(g.index_heads, g.index_dim, g.rope_dim, g.index_topk, torch.bfloat16):
            self.lightning_indexer = indexer.lightning_indexer
