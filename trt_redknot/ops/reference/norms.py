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


def turn_rows(rows_RD: torch.Tensor, frames_R: torch.Tensor, rope: torch.Tensor) -> None:
    """Turn the last channels of rows by the angles of the positions `frames_R`, in place: from a document's frame to
    the request's. A constant factor of the table does not count: the rows have it already."""
    last = rows_RD[..., rows_RD.shape[-1] - 2 * rope.shape[1] :]
    last.copy_(rotate(last, rope / rope[0, 0, 0], frames_R))
