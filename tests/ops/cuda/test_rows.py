"""Rows that are written as wide words are the rows that plain indexing writes, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.ops.cuda.rows import write_rows

DTYPES = st.sampled_from([torch.bfloat16, torch.uint8, torch.float32, torch.float64])
SHAPES = st.sampled_from([(512,), (584,), (4, 64), (7,), (6,), (12,), (132,)])


@given(DTYPES, SHAPES, st.integers(1, 30), st.integers(0, 30), st.integers(0, 2**31))
def test_rows_are_written_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], pool_rows: int, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = min(count, pool_rows)

    def numbers(rows: int) -> torch.Tensor:
        """Any bits, NaN among them."""
        size = torch.Size(shape).numel() * dtype.itemsize
        stored = torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=generator)
        return stored.view(dtype).view(rows, *shape)

    pool, values = numbers(pool_rows), numbers(count)
    rows = torch.randperm(pool_rows, generator=generator)[:count]
    expected = pool.clone()
    expected[rows] = values
    write_rows(pool, rows, values)
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


def test_no_rows_are_no_trouble() -> None:
    for shape in ((0, 4, 8), (0, 8)):
        write_rows(torch.zeros(3, *shape[1:]), torch.zeros(0, dtype=torch.int64), torch.zeros(shape))


def test_values_take_the_dtype_of_the_pool() -> None:
    pool = torch.zeros(3, 8, dtype=torch.bfloat16)
    write_rows(pool, torch.tensor([2]), torch.full((1, 8), 1.5))
    assert pool.sum(1).tolist() == [0, 0, 12]


def test_a_row_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        write_rows(torch.zeros(3, 8), torch.tensor([3]), torch.zeros(1, 8))
