"""Manifold-constrained hyper-connections: S residual streams mixed into and out of every block (paper section 2.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trt_redknot.ops.reference.norms import rms_norm
from trt_redknot.ops.reference.numerics import normalise, wide


def _sinkhorn(comb: torch.Tensor, *, iterations: int, eps: float) -> torch.Tensor:
    """Alternate column and row normalisation, columns first, of positive matrices [..., S, S]."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def hyper_connection_pre(
    streams_RSM: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_M: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    streams = streams_RSM.shape[1]
    dtype = wide(streams_RSM.dtype)
    mixes = F.linear(normalise(streams_RSM.flatten(1), norm_eps), fn.to(dtype))
    base, scale = base.to(dtype), scale.to(dtype)
    pre, post, comb = mixes.split([streams, streams, streams * streams], dim=-1)
    base_pre, base_post, base_comb = base.split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    comb = (comb * scale[2] + base_comb).view(-1, streams, streams).softmax(-1) + eps
    collapsed = (pre.unsqueeze(-1) * streams_RSM.to(dtype)).sum(1).to(streams_RSM.dtype)
    return rms_norm(collapsed, norm_M, eps=norm_eps), post, _sinkhorn(comb, iterations=iterations, eps=eps)


def hyper_connection_post(
    streams_RSM: torch.Tensor, output_RM: torch.Tensor, post_RS: torch.Tensor, comb_RSS: torch.Tensor
) -> torch.Tensor:
    dtype = streams_RSM.dtype
    mixed = torch.matmul(comb_RSS.to(dtype).transpose(-1, -2), streams_RSM)
    return post_RS.to(dtype).unsqueeze(-1) * output_RM.unsqueeze(1) + mixed


def hyper_head(
    streams_RSM: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_M: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
) -> torch.Tensor:
    dtype = wide(streams_RSM.dtype)
    mixes = F.linear(normalise(streams_RSM.flatten(1), norm_eps), fn.to(dtype))
    pre = torch.sigmoid(mixes * scale.to(dtype) + base.to(dtype)) + eps
    collapsed = (pre.unsqueeze(-1) * streams_RSM.to(dtype)).sum(1).to(streams_RSM.dtype)
    return rms_norm(collapsed, norm_M, eps=norm_eps)
