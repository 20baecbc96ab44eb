"""Every collective against plain torch: each rank knows what all ranks put in, and so what must come out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from trt_redknot.collectives import Collectives

MOVED = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn,
)  # fmt: skip
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
ROW_SHAPES = ((), (1,), (3, 2))


def failures(ranks: Collectives, seed: int) -> tuple[int, list[str]]:
    """How many comparisons were made, and which of them failed. Collective."""
    checked, failed = 0, []
    for name, expected, found in _comparisons(ranks, random.Random(seed)):
        checked += 1
        same = expected.dtype == found.dtype and expected.shape == found.shape
        # Values are small integers, so that every sum is exact in every dtype and in any order.
        if not same or not torch.equal(expected.double(), found.double()):
            failed.append(f"{name} {expected.dtype}: expected {expected.tolist()}, found {found.tolist()}")
    return checked, failed


def _values(draw: random.Random, rows: int, row: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randint(0, 8, (rows, *row), generator=generator).to(dtype)


def _counts(draw: random.Random, size: int) -> Iterator[list[int]]:
    yield [draw.randrange(4) for _ in range(size)]
    yield [0] * size
    lonely = [0] * size
    lonely[draw.randrange(size)] = 5
    yield lonely


def _comparisons(ranks: Collectives, draw: random.Random) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for dtype in MOVED:
        for counts in _counts(draw, ranks.size):
            yield _gather(ranks, draw, counts, draw.choice(ROW_SHAPES), dtype)
        yield _exchange_rows(ranks, draw, draw.choice(ROW_SHAPES), dtype)
    for dtype in SUMMED:
        for counts in _counts(draw, ranks.size):
            yield _reduce_scatter(ranks, draw, counts, draw.choice(ROW_SHAPES), dtype)
        yield _reduce(ranks, draw, draw.choice([0, 1, 4]), draw.choice(ROW_SHAPES), dtype)


def _gather(
    ranks: Collectives, draw: random.Random, counts: list[int], row: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, torch.Tensor, torch.Tensor]:
    parts = [_values(draw, count, row, dtype) for count in counts]
    return f"all_gather {counts}", torch.cat(parts), ranks.all_gather(parts[ranks.rank], counts)


def _exchange_rows(
    ranks: Collectives, draw: random.Random, row: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, torch.Tensor, torch.Tensor]:
    counts = [[draw.choice([0, 0, 1, 3]) for _ in range(ranks.size)] for _ in range(ranks.size)]
    parts = [[_values(draw, count, row, dtype) for count in sender] for sender in counts]
    received = [sender[ranks.rank] for sender in counts]
    found = ranks.all_to_all(torch.cat(parts[ranks.rank]), counts[ranks.rank], received)
    return f"all_to_all {counts}", torch.cat([sender[ranks.rank] for sender in parts]), found


def _reduce_scatter(
    ranks: Collectives, draw: random.Random, counts: list[int], row: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, torch.Tensor, torch.Tensor]:
    partials = [_values(draw, sum(counts), row, dtype) for _ in range(ranks.size)]
    start = sum(counts[: ranks.rank])
    expected = torch.stack(partials).double().sum(0).to(dtype)[start : start + counts[ranks.rank]]
    return f"reduce_scatter {counts}", expected, ranks.reduce_scatter(partials[ranks.rank], counts)


def _reduce(
    ranks: Collectives, draw: random.Random, rows: int, row: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, torch.Tensor, torch.Tensor]:
    partials = [_values(draw, rows, row, dtype) for _ in range(ranks.size)]
    expected = torch.stack(partials).double().sum(0).to(dtype)
    return f"all_reduce {rows}", expected, ranks.all_reduce(partials[ranks.rank])
