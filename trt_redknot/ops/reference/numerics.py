"""Small numerics the reference ops share."""

from __future__ import annotations

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def rope_table(inverse_frequencies: torch.Tensor, positions: int, *, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """cos and sin of positions 0 .. positions - 1: [positions, P / 2, 2].

    Angles are taken in float64: in float32 a position of 440,000 would be off by 0.02 rad and relocation with it.
    """
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * inverse_frequencies.double().unsqueeze(0)
    return (torch.stack((angles.cos(), angles.sin()), dim=-1) * factor).to(dtype)


def rotate(x: torch.Tensor, rope: torch.Tensor, positions_R: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Interleaved RoPE on the last channels of x [R, ..., D] at the given positions; `inverse` turns back."""
    dtype = wide(x.dtype)
    pairs = rope.shape[1]
    cos_sin = rope[positions_R].to(dtype)
    shape = (x.shape[0], *([1] * (x.dim() - 2)), pairs)
    cos, sin = cos_sin[..., 0].view(shape), cos_sin[..., 1].view(shape)
    if inverse:
        sin = -sin
    tail = x[..., x.shape[-1] - 2 * pairs :].to(dtype)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - 2 * pairs], turned.to(x.dtype)), dim=-1)


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its RMS along the last axis, in the wide dtype."""
    x = x.to(wide(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
