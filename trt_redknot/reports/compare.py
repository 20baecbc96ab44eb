"""How far the answer of one arm is from the other's."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """KL(reference || other) in nats of the next-token distributions, from logits [V] of each, summed in fp64.

    Raises:
        ValueError: the shapes differ, or a logit is not finite.
    """
    if reference.shape != other.shape:
        raise ValueError(f"logits of shapes {tuple(reference.shape)} and {tuple(other.shape)} cannot be compared")
    if not (torch.isfinite(reference).all() and torch.isfinite(other).all()):
        raise ValueError("a logit is not finite")
    log_p = reference.double().log_softmax(-1)
    log_q = other.double().log_softmax(-1)
    # Rounding can leave a negative zero of the size of fp64's epsilon.
    return max(0.0, float((log_p.exp() * (log_p - log_q)).sum()))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both answers begin with."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
