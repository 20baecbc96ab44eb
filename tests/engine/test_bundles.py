"""Pointer geometry of repeated bundles: served again for the same bundle, never for another one, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.conftest import Bench
from trt_redknot import Artifact, Request, Response, ReusePolicy, Tokens
from trt_redknot.engine.bundles import BundleCache
from trt_redknot.engine.prefill import Prefill

POLICY = ReusePolicy(boundary=8, tail=0, top_entries=3, budget=0.2)
LENGTHS = (128, 70, 70)


@pytest.fixture
def cache(bench: Bench) -> Iterator[BundleCache]:
    """Of the shared engine, empty."""
    found = bench.engine._context.bundles
    empty = BundleCache()
    object.__setattr__(bench.engine._context, "bundles", empty)
    yield empty
    object.__setattr__(bench.engine._context, "bundles", found)


def ask(bench: Bench, segments: list[Any], reuse: ReusePolicy | None = POLICY, steps: int = 3) -> Response:
    request = Request(segments=segments, max_new_tokens=steps, stop_tokens=[], reuse=reuse)
    return bench.engine.generate(request, store=bench.store)


def documents(bench: Bench) -> list[Artifact]:
    return [Artifact(bench.engine.build_artifact(bench.store, bench.tokens(length))) for length in LENGTHS]


def test_a_bundle_is_worked_out_once_whatever_is_asked_and_answered(
    bench: Bench, cache: BundleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the first request grew by its answer, and where tables are first asked for by a later one."""
    bundle = documents(bench)
    questions = [Tokens(bench.tokens(11)) for _ in range(3)]
    cache.hits = cache.misses = 0
    found = [ask(bench, [*bundle, question]) for question in questions]
    assert (cache.hits, cache.misses) == (2, 1)
    made = []
    make = Prefill._make_bundle
    monkeypatch.setattr(Prefill, "_make_bundle", lambda prefill: made.append(1) or make(prefill))
    for question, served in zip(questions, found, strict=True):
        cache.capacity = 0
        fresh = ask(bench, [*bundle, question])
        assert torch.equal(fresh.first_logits, served.first_logits)
        assert fresh.tokens == served.tokens
        assert fresh.report.rows == served.report.rows
    # The first of these was still held.
    assert len(made) == 2


def test_a_changed_bundle_is_not_served(bench: Bench, cache: BundleCache) -> None:
    """Another document of equal length, another order, other edits, lengths and policies: each is worked out, and
    answers as without a cache."""
    first, second, third = documents(bench)
    other = Artifact(bench.engine.build_artifact(bench.store, bench.tokens(LENGTHS[1])))
    question, longer = Tokens(bench.tokens(11)), Tokens(bench.tokens(12))
    edited = Artifact(third.artifact_id, edits={3: 5})
    active = POLICY.model_copy(update={"epilogue": "active"})
    requests: list[tuple[list[Any], ReusePolicy | None]] = [
        ([first, second, third, question], POLICY),
        ([first, other, third, question], POLICY),
        ([first, third, second, question], POLICY),
        ([second, first, third, question], POLICY),
        ([first, second, edited, question], POLICY),
        ([first, second, third, longer], POLICY),
        ([first, second, question, third], POLICY),
        ([first, second, third, question], active),
        ([first, second, third, question], POLICY.model_copy(update={"boundary": 4})),
        ([first, second, third, question], None),
    ]
    cache.hits = cache.misses = 0
    found = [ask(bench, segments, policy) for segments, policy in requests]
    assert (cache.hits, cache.misses) == (0, len(requests))
    again = [ask(bench, segments, policy) for segments, policy in requests]
    assert (cache.hits, cache.misses) == (len(requests), len(requests))
    cache.capacity = 0
    ask(bench, [question], None)
    for (segments, policy), served, repeated in zip(requests, found, again, strict=True):
        fresh = ask(bench, segments, policy)
        for answer in (served, repeated):
            assert torch.equal(answer.first_logits, fresh.first_logits)
            assert answer.tokens == fresh.tokens
    assert cache.hits == len(requests)


def test_bundles_are_bounded_by_their_bytes_and_the_oldest_goes_first(bench: Bench, cache: BundleCache) -> None:
    texts = [Tokens(bench.tokens(length)) for length in (40, 50, 60)]
    for text in texts[:2]:
        ask(bench, [text], None, steps=1)
    both = cache.nbytes
    assert both > 0
    cache.capacity = both
    ask(bench, [texts[0]], None, steps=1)
    assert cache.hits == 1
    ask(bench, [texts[2]], None, steps=1)
    # The second was used longest ago.
    ask(bench, [texts[0]], None, steps=1)
    assert (cache.hits, cache.misses) == (2, 3)
    ask(bench, [texts[1]], None, steps=1)
    assert cache.misses == 4
    cache.capacity = 0
    ask(bench, [texts[1]], None, steps=1)
    assert cache.nbytes == 0
