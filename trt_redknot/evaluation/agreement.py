"""How far two arms' answers agree: tokens, natural stop, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_redknot.reports.compare import common_prefix

COMPARED_TOKENS = 128
_LONGEST_PERIOD = 32
_REPEATS = 4
# A period repeated to less than this many tokens may be the answer: "no, no, no, no".
_SHORTEST_LOOP = 16


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Two answers, position by position.

    Attributes:
        same: positions with the same token, over the longer answer, at most `COMPARED_TOKENS` of them.
        compared: those positions.
        prefix: tokens both begin with.
    """

    same: int
    compared: int
    prefix: int

    @property
    def share(self) -> float:
        return self.same / self.compared if self.compared else 1.0


def token_agreement(first: Sequence[int], second: Sequence[int]) -> Agreement:
    """Agreement over the first `COMPARED_TOKENS` tokens; a position that only one answer reaches is a disagreement."""
    one, other = first[:COMPARED_TOKENS], second[:COMPARED_TOKENS]
    same = sum(a == b for a, b in zip(one, other, strict=False))
    return Agreement(same=same, compared=max(len(one), len(other)), prefix=common_prefix(one, other))


def repetition(tokens: Sequence[int]) -> int | None:
    """The period of the loop that an answer ends in: the same 1 to 32 tokens four times in a row or more, over at least
    16 tokens. None where it ends in no loop."""
    for period in range(1, _LONGEST_PERIOD + 1):
        span = max(_REPEATS * period, _SHORTEST_LOOP)
        if len(tokens) >= span and all(tokens[-i] == tokens[-i - period] for i in range(1, span - period + 1)):
            return period
    return None
