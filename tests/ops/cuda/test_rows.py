"""Rows written as wide words are those that plain indexing writes, bit for bit; rows that are turned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benches.common import random_rope
from tests.support.gpu import needs_gpu
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda import rows as kernels
from trt_redknot.ops.cuda.rows import write_rows
from trt_redknot.ops.reference import norms
from trt_redknot.ops.reference.numerics import rotate

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


@given(st.integers(0, 9), st.sampled_from([2, 8, 64]), st.integers(0, 2**31))
def test_rows_turned_from_their_frame_are_rows_of_the_request(count: int, rope_dim: int, seed: int) -> None:
    """Rotated to a position in a document, then turned by where the document begins, against rotated once; in fp64,
    with a factor on the table."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(300, dtype=torch.float64)[:, None] * torch.rand(rope_dim // 2, generator=generator).double()
    rope = 1.25 * torch.stack((angles.cos(), angles.sin()), dim=-1)
    plain = torch.randn((count, 100), generator=generator, dtype=torch.float64)
    inside = torch.randint(0, 150, (count,), generator=generator)
    frames = torch.randint(0, 150, (count,), generator=generator)
    rows = rotate(plain, rope, inside)
    norms.turn_rows(rows, frames, rope)
    torch.testing.assert_close(rows, rotate(plain, rope, inside + frames), atol=1e-12, rtol=0)


@needs_gpu
@given(st.integers(0, 700), st.sampled_from([128, 512]), st.sampled_from([1.0, 1.25]), st.integers(0, 2**31))
def test_the_kernel_turns_as_the_reference_does(count: int, width: int, factor: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((count, width), generator=generator).bfloat16()
    frames = torch.randint(0, 2048, (count,), generator=generator)
    frames[torch.rand(count, generator=generator) < 0.3] = 0
    rope = random_rope(2048, 64) * factor
    expected = rows.float()
    norms.turn_rows(expected, frames, rope)
    pool = torch.full((count + 2, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    found = pool[1:-1]
    found.copy_(rows)
    kernels.turn_rows(found, frames.cuda(), rope.cuda())
    assert bool(pool[0].isnan().all())
    assert bool(pool[-1].isnan().all())
    assert torch.equal(found[frames == 0].cpu(), rows[frames == 0])
    assert torch.equal(found[:, : width - 64].cpu(), rows[:, : width - 64])
    # Rounded once; sums of two products may round the other way where they end between two numbers.
    torch.testing.assert_close(found.cpu().float(), expected, atol=1e-6, rtol=2**-8)


@needs_gpu
@pytest.mark.parametrize("wrong", ["dtype", "frames", "width"])
def test_rows_that_the_kernel_does_not_serve_are_refused(wrong: str) -> None:
    rows = torch.zeros((4, 60 if wrong == "width" else 128), dtype=torch.bfloat16, device="cuda")
    frames = torch.zeros(5 if wrong == "frames" else 4, dtype=torch.int64, device="cuda")
    with pytest.raises(EngineError, match="refused"):
        kernels.turn_rows(rows.float() if wrong == "dtype" else rows, frames, random_rope(8, 64).cuda())
