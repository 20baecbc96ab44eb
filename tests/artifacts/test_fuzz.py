"""Fuzzing: the kept corpus always, then some seconds of new inputs."""

from __future__ import annotations

import random

import pytest

from tests.artifacts import fuzz
from tests.artifacts.fuzz import CERTIFICATE, TILE, FuzzTally, Target, corpus_of

SECONDS = 4.0
TARGETS = pytest.mark.parametrize("target", [CERTIFICATE, TILE], ids=lambda target: target.name)


@TARGETS
def test_the_corpus_holds_every_way_through_the_parser(target: Target) -> None:
    tally = fuzz.fuzz(target, seconds=0.0, seed=0, corpus=corpus_of(target))
    assert tally.problems == []
    assert tally.accepted > 0
    assert tally.runs == len(corpus_of(target))
    # Some of the kept inputs are the only ones that reach some line, so hardly any can be left out.
    assert tally.corpus > tally.runs // 3


@TARGETS
def test_new_inputs_parse_or_are_refused_with_a_fault(target: Target) -> None:
    seed = random.randrange(2**31)
    tally = fuzz.fuzz(target, seconds=SECONDS, seed=seed, corpus=corpus_of(target))
    assert tally.problems == [], f"seed {seed}"
    assert tally.runs > 2 * len(corpus_of(target)), tally


def test_the_fuzzer_finds_what_a_parser_does_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that trusts lengths breaks within the same time."""

    def trusting(raw: bytes) -> tuple[str, str] | None:
        assert int.from_bytes(raw[:8], "little") <= len(raw), "trusted"
        return None

    broken = Target(name="broken", parse=trusting, split=TILE.split, join=TILE.join, traced=TILE.traced)
    tally: FuzzTally = fuzz.fuzz(broken, seconds=1.0, seed=1, corpus=[bytes(64)])
    assert any("trusted" in problem for problem in tally.problems)
