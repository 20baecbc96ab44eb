"""Drawing tokens: any valid parameters draw something, and what they must."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.engine.sampling import Sampler
from trt_redknot.request.request import Sampling

LOGITS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=50)


@given(logits=st.lists(st.integers(-100, 100), min_size=2, max_size=50), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30])
def test_the_least_temperatures_are_greedy(logits: list[int], seed: int, temperature: float) -> None:
    values = torch.tensor(logits).float()
    drawn = Sampler(Sampling(temperature=temperature, seed=seed)).draw(values)
    assert values[drawn] == values.max()


@given(
    logits=LOGITS, seed=st.integers(0, 2**31), temperature=st.floats(0, 1e300), top_p=st.floats(1e-300, 1),
    top_k=st.none() | st.integers(1, 60),
)  # fmt: skip
def test_any_parameters_draw_a_token_that_they_allow(
    logits: list[float], seed: int, temperature: float, top_p: float, top_k: int | None
) -> None:
    values = torch.tensor(logits)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    drawn = Sampler(sampling).draw(values)
    assert drawn == Sampler(sampling).draw(values)
    if top_k is not None and temperature > 0:
        assert int((values > values[drawn]).sum()) < top_k


def test_frequencies_are_the_softmax() -> None:
    values = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(Sampling(temperature=0.7, seed=3))
    counts = torch.bincount(torch.tensor([sampler.draw(values) for _ in range(4000)]), minlength=3)
    assert (counts / 4000 - (values / 0.7).softmax(0)).abs().max() < 0.03
