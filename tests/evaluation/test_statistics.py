"""Bootstrap intervals: cover what they should, are seeded, and refuse what has no mean."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.evaluation.statistics import bootstrap


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=40), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_an_interval_lies_around_its_mean_and_inside_the_values(values: list[float], seed: int) -> None:
    found = bootstrap(values, seed=seed, resamples=500)
    assert found.count == len(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    assert bootstrap(values, seed=seed, resamples=500) == found


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap([0.25] * 7).low == bootstrap([0.25] * 7).high == 0.25


def test_the_interval_has_the_width_of_the_normal_one() -> None:
    values = np.random.default_rng(random.randrange(2**31)).normal(size=400)
    found = bootstrap(values.tolist(), resamples=4000)
    expected = 2 * 1.96 * values.std() / 20
    assert found.high - found.low == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_without_a_mean_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite values"):
        bootstrap(values)
