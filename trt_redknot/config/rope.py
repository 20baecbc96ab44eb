"""Rope tables: inverse frequencies of a :class:`RopeGeometry`, equal bit for bit to those transformers computes."""

from __future__ import annotations

import math

import torch

from trt_redknot.config.geometry import RopeGeometry


def inverse_frequencies(rope: RopeGeometry) -> torch.Tensor:
    """Radians per token of every rotated pair.

    With YaRN, pairs that turn often over the original context keep their frequency, pairs that turn rarely are slowed
    down by `factor`, and those between are mixed linearly over the whole pairs that bracket them.

    Returns:
        fp32 [dim / 2].
    """
    wavelengths = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    native = 1.0 / wavelengths
    if rope.factor is None:
        return native
    slowed = 1.0 / (rope.factor * wavelengths)
    # `keep` is subtracted from 1 twice, as the published function does: 1 - (1 - ramp) is not always ramp in fp32.
    keep = 1 - _ramp(rope)
    return slowed * (1 - keep) + native * keep


def _ramp(rope: RopeGeometry) -> torch.Tensor:
    """Share of the slowed frequency by pair: 0 up to `beta_fast` turns over the context, 1 from `beta_slow` on."""
    assert rope.original_positions is not None, "a YaRN table names its original context"
    low = max(math.floor(_pair_with_turns(rope, rope.beta_fast, rope.original_positions)), 0)
    high: float = min(math.ceil(_pair_with_turns(rope, rope.beta_slow, rope.original_positions)), rope.dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rope.dim // 2, dtype=torch.float32)
    return torch.clamp((pairs - low) / (high - low), 0, 1)


def _pair_with_turns(rope: RopeGeometry, turns: float, positions: int) -> float:
    return (rope.dim * math.log(positions / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))
