"""Means with bootstrap intervals. Records are resampled, so both arms of a record stay together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over `count` records and its percentile bootstrap interval."""

    mean: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, float | int]:
        return {"mean": self.mean, "low": self.low, "high": self.high, "count": self.count}


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Mean of `values` with its 95 % percentile interval. For a difference of arms, hand in the differences: paired.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError("a mean needs finite values, at least one")
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [
            array[rng.integers(0, array.size, (min(1000, resamples - start), array.size))].mean(axis=1)
            for start in range(0, resamples, 1000)
        ]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean=float(array.mean()), low=float(low), high=float(high), count=int(array.size))
