"""Norms and the ops made of a norm and a rotation."""

from __future__ import annotations

import torch

from trt_redknot.ops.reference.numerics import normalise, rotate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return (weight.to(torch.promote_types(weight.dtype, torch.float32)) * normalise(x, eps)).to(x.dtype)


def query_norm(q_RHD: torch.Tensor, *, eps: float) -> torch.Tensor:
    return normalise(q_RHD, eps).to(q_RHD.dtype)


def norm_rope_pack(
    latents_RD: torch.Tensor, norm_D: torch.Tensor, rope: torch.Tensor, positions_R: torch.Tensor, *, eps: float
) -> torch.Tensor:
    return rotate(rms_norm(latents_RD, norm_D, eps=eps), rope, positions_R)
