"""Rows of a chunk from memory: never fewer than asked, never more than fit, and more memory never means fewer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.conftest import Bench
from trt_redknot import Engine, Request, Tokens
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.engine.chunking import MOST_ROWS, choose_chunk_rows, chunk_row_bytes, raw_row_bytes
from trt_redknot.errors import EngineError
from trt_redknot.reports.footprint import WeightDtype, estimate

FLASH = released_geometry("flash")
GIB = 2**30


def chosen(free: int, *, length: int = 65536, least: int = 1024, size: int = 8) -> int:
    return choose_chunk_rows(
        FLASH, SplitProfile.default(FLASH), tp_size=size, length=length, free_bytes=free, least=least,
        dtype=torch.bfloat16,
    )  # fmt: skip


@settings(deadline=None)
@given(st.integers(-GIB, 200 * GIB), st.integers(0, 50 * GIB), st.integers(1, 440_000), st.sampled_from([1, 2, 4, 8]))
def test_more_memory_never_means_smaller_chunks(free: int, more: int, length: int, size: int) -> None:
    few, many = chosen(free, length=length, size=size), chosen(free + more, length=length, size=size)
    assert 1024 <= few <= many <= MOST_ROWS
    if few > 1024:
        assert few * chunk_row_bytes(FLASH, size, 2) <= free


def test_a_rank_of_eight_with_its_weights_takes_the_largest_chunks_at_any_released_length() -> None:
    """139 GiB less 68 GiB of weights, which is what one H200 has left."""
    assert {chosen(70 * GIB, length=length) for length in (65536, 262_144, 440_000)} == {MOST_ROWS}


@pytest.mark.parametrize("length", [65536, 262_144, 440_000])
def test_weights_artifacts_caches_and_a_chunk_fit_one_h200(length: int) -> None:
    """Everything that a rank of eight holds at once in the bench: 139.8 GiB are there, some are left."""
    profile = SplitProfile.default(FLASH)
    parts = estimate(FLASH, profile, tp_size=8, length=length)
    runtime = parts.runtime
    weights = parts.weight_total(WeightDtype.BFLOAT16)
    rows = chosen(int(139.8 * GIB) - weights, length=length)
    streams = 3 * runtime.streams
    raw = 2 * length * raw_row_bytes(FLASH, 2)
    # A rank's artifacts in the bench: one layer's tensors, which all layers share, and the streams.
    layer = length * (2 * FLASH.head_dim + 2 * FLASH.projected // 8 + FLASH.head_dim // 2 + FLASH.index_dim // 2)
    artifacts = layer + length * 2 * FLASH.streams * FLASH.hidden
    held = weights + artifacts + runtime.latents + runtime.entries + runtime.index_keys + streams + raw
    total = held + rows * chunk_row_bytes(FLASH, 8, 2)
    assert total < 130 * GIB
    assert rows == MOST_ROWS


@pytest.mark.parametrize("least", [1, 4096, 50_000])
def test_without_memory_it_is_what_was_asked_at_least(least: int) -> None:
    assert chosen(0, least=least) == least


def test_an_engine_takes_the_chunks_it_is_told_and_answers_the_same(bench: Bench) -> None:
    request = Request(segments=[Tokens(bench.tokens(150))], max_new_tokens=3)
    small = Engine.open(bench.directory / "engine", chunk_rows=7)
    torch.testing.assert_close(
        small.generate(request).first_logits, bench.engine.generate(request).first_logits, atol=1e-6, rtol=0
    )


def test_no_rows_are_no_chunk(bench: Bench) -> None:
    with pytest.raises(EngineError, match="at least 1, found 0"):
        Engine.open(bench.directory / "engine", chunk_rows=0)
