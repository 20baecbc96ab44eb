"""Agreement of tokens and detection of repetition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.evaluation.agreement import COMPARED_TOKENS, repetition, token_agreement

TOKENS = st.lists(st.integers(0, 3), max_size=150)


@given(first=TOKENS, second=TOKENS)
@settings(max_examples=150, deadline=None)
def test_agreement_counts_positions(first: list[int], second: list[int]) -> None:
    found = token_agreement(first, second)
    one, other = first[:COMPARED_TOKENS], second[:COMPARED_TOKENS]
    same = [a == b for a, b in zip(one, other, strict=False)]
    assert found.same == sum(same)
    assert found.compared == max(len(one), len(other))
    assert found.prefix == (same.index(False) if False in same else len(same))
    assert 0.0 <= found.share <= 1.0
    assert token_agreement(first, first).share == 1.0


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([7] * 16, 1),
        ([7] * 15, None),
        ([1, 2, 3] + [4, 5] * 8, 2),
        ([4, 5] * 8 + [6], None),
        ([1, 2, 3, 4, 5, 6, 7] * 4, 7),
        ([1, 2, 3, 4, 5, 6, 7] * 3, None),
        (list(range(200)), None),
        (list(range(32)) * 4, 32),
        (list(range(33)) * 4, None),
        ([], None),
    ],
)
def test_an_answer_that_ends_in_a_loop_is_found(tokens: list[int], period: int | None) -> None:
    assert repetition(tokens) == period


@given(loop=st.lists(st.integers(0, 9), min_size=1, max_size=32), before=st.lists(st.integers(10, 19), max_size=20))
@settings(max_examples=100, deadline=None)
def test_every_loop_is_found_with_its_shortest_period(loop: list[int], before: list[int]) -> None:
    tokens = before + loop * max(4, -(-16 // len(loop)))
    found = repetition(tokens)
    assert found is not None
    assert len(loop) % found == 0 or found < len(loop)
    span = max(4 * found, 16)
    assert all(tokens[-i] == tokens[-i - found] for i in range(1, span - found + 1))
