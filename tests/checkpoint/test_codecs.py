"""Block formats against values worked out with exact arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.checkpoint import (
    dequantize_fp4,
    dequantize_fp8,
    quantize_fp4,
    quantize_fp8_blocks,
    repack_fp4_to_fp8,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SIGNED_E2M1 = E2M1 + [-value for value in E2M1]


def e4m3(code: int) -> float:
    """Value of an e4m3 code by its definition: bias 7, no infinities, all ones is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def nearest_even(values: torch.Tensor, magnitudes: list[float]) -> torch.Tensor:
    """Codes of the magnitudes nearest to |values| (float64, exact), the even code where two are equally near."""
    grid = torch.tensor(magnitudes, dtype=torch.float64)
    distances = (values.double().abs()[..., None] - grid).abs()
    tied = distances == distances.amin(-1, keepdim=True)
    even = torch.arange(len(magnitudes)) % 2 == 0
    # At most two codes tie, and of two neighbours one is even: it weighs more.
    return (tied.int() * (1 + even.int())).argmax(-1)


def test_every_fp4_code_with_every_scale() -> None:
    exponents = torch.arange(-127, 128)
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(exponents), 1)
    scales = ue8m0(exponents)[:, None].expand(-1, 16).contiguous()
    decoded = dequantize_fp4(codes, scales)
    for row, exponent in enumerate(exponents.tolist()):
        expected = [SIGNED_E2M1[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
        expected = torch.tensor([math.ldexp(value, exponent) for value in expected], dtype=torch.float64)
        assert torch.equal(decoded[row].double(), expected.float().double()), exponent
        # Below 2^128 and above the subnormals fp32 holds the product itself.
        if -120 <= exponent <= 124:
            assert torch.equal(decoded[row].double(), expected), exponent
    assert torch.signbit(decoded[0, 2 * 8]).item(), "code 8 is minus zero"
    assert torch.equal(decoded, dequantize_fp4(codes.view(torch.int8), scales.float()))


def test_every_fp8_code_with_every_scale() -> None:
    values = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    for exponent in range(-127, 128):
        scales = ue8m0(torch.full((1, 2), exponent))
        expected = (values * 2.0**exponent).float()
        for decoded in (dequantize_fp8(codes, scales), dequantize_fp8(codes, scales.float())):
            assert torch.equal(torch.isnan(decoded[0]), torch.isnan(expected))
            assert torch.equal(decoded[0].nan_to_num(7.0), expected.nan_to_num(7.0)), exponent


shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))


def random_weights(seed: int, shape: tuple[int, int], spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    return weights.where(torch.rand(shape, generator=generator) > 0.1, 0.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shape=shapes, data=st.data())
def test_a_rectangle_uses_the_scales_of_its_blocks(seed: int, shape: tuple[int, int], data: st.DataObject) -> None:
    codes, scales = quantize_fp8_blocks(random_weights(seed, shape, 2.0))
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    grid = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    whole = codes.float() * grid
    assert torch.equal(dequantize_fp8(codes, scales), whole)
    top, left = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    bottom, right = data.draw(st.integers(top + 1, shape[0])), data.draw(st.integers(left + 1, shape[1]))
    part = dequantize_fp8(
        codes[top:bottom, left:right],
        scales[top // 128 : (bottom - 1) // 128 + 1, left // 128 : (right - 1) // 128 + 1],
        first_row=top,
        first_column=left,
    )
    assert torch.equal(part, whole[top:bottom, left:right])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.tuples(st.integers(1, 140), st.integers(1, 140)))
def test_fp8_rounds_to_nearest_even_with_the_smallest_scale(seed: int, shape: tuple[int, int]) -> None:
    weights = random_weights(seed, shape, 1.0)
    codes, scales = quantize_fp8_blocks(weights)
    wide = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    raw = codes.view(torch.uint8).long()
    assert torch.equal(raw & 0x7F, nearest_even(weights.double() / wide, [e4m3(code) for code in range(127)]))
    assert torch.equal(raw >= 0x80, torch.signbit(weights))
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            block = weights[down * 128 : down * 128 + 128, across * 128 : across * 128 + 128]
            largest, scale = block.abs().max().item(), scales[down, across].float().item()
            if largest:
                assert largest <= 448 * scale
                assert largest > 448 * scale / 2
            else:
                assert scale == 1.0


def test_fp8_ties_go_to_the_even_code() -> None:
    finite = [e4m3(code) for code in range(127)]
    ties = torch.tensor([[(low + high) / 2 for low, high in itertools.pairwise(finite)] + [448.0]])
    codes = quantize_fp8_blocks(torch.cat([ties, -ties]))[0].view(torch.uint8)
    even = torch.tensor([code if code % 2 == 0 else code + 1 for code in range(126)])
    assert torch.equal(codes[0, :-1].long(), even)
    assert torch.equal(codes[1, :-1].long(), even + 128)


def test_fp4_rounds_every_boundary_to_the_even_code() -> None:
    points = sorted({(low + high) / 2 for low, high in itertools.pairwise(E2M1)} | set(E2M1))
    around = [
        value
        for point in points
        for value in (point, math.nextafter(point, 0.0) if point else 0.0, math.nextafter(point, 10.0))
    ]
    values = [float(torch.tensor(value, dtype=torch.float32)) for value in around if value <= 6.0]
    values += [float(torch.nextafter(torch.tensor(point), torch.tensor(0.0))) for point in points if point]
    for value in values:
        for sign in (1.0, -1.0):
            row = torch.tensor([[sign * value] * 31 + [6.0]])
            codes, scales = quantize_fp4(row)
            assert scales.float().item() == 1.0
            low = int(codes[0, 0].item()) & 15
            assert low % 8 == nearest_even(torch.tensor(value), E2M1).item(), (sign, value)
            assert (low >= 8) == (sign < 0)
            assert int(codes[0, 15].item()) >> 4 == 7, "the second column of a byte is its high nibble"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 20), half=st.integers(1, 70), spread=st.floats(0, 4))
def test_fp4_blocks(seed: int, rows: int, half: int, spread: float) -> None:
    weights = random_weights(seed, (rows, 2 * half), spread)
    codes, scales = quantize_fp4(weights)
    assert codes.shape == (rows, half)
    assert scales.shape == (rows, -(-2 * half // 32))
    decoded = dequantize_fp4(codes, scales)
    grid = scales.float().repeat_interleave(32, 1)[:, : 2 * half]
    assert bool((weights.abs() <= 6 * grid).all())
    nearest = torch.tensor(E2M1, dtype=torch.float64)[nearest_even(weights.double() / grid.double(), E2M1)]
    assert torch.equal(decoded.double().abs(), nearest * grid.double())
    again = quantize_fp4(decoded)
    assert torch.equal(dequantize_fp4(*again), decoded)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.tuples(st.integers(1, 200), st.integers(1, 100)), low=st.integers(-100, 80))
def test_repacking_is_exact_while_scales_lie_close(seed: int, shape: tuple[int, int], low: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    blocks = (shape[0], -(-2 * shape[1] // 32))
    scales = ue8m0(torch.randint(low, low + 15, blocks, generator=generator))
    assert torch.equal(dequantize_fp8(*repack_fp4_to_fp8(codes, scales)), dequantize_fp4(codes, scales))


def test_repacking_beyond_the_range_rounds_to_nearest_even() -> None:
    # One scale 2^15 below the block's largest: 0.5 is half of FP8's smallest step (to 0), 1.5 is 1.5 of it (to 2).
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0] = 0x07
    codes[0, 16], codes[0, 17] = 0x31, 0x02
    repacked = dequantize_fp8(*repack_fp4_to_fp8(codes, ue8m0(torch.tensor([[15, 0]]))))
    assert repacked[0, 0].item() == 6.0 * 2**15
    assert repacked[0, 32:36].tolist() == [0.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weights = torch.zeros(2, 4)
    weights[1, 2] = value
    for quantize in (quantize_fp4, quantize_fp8_blocks):
        with pytest.raises(ValueError, match="finite"):
            quantize(weights)


def test_fp4_needs_an_even_number_of_columns() -> None:
    with pytest.raises(ValueError, match="even"):
        quantize_fp4(torch.zeros(2, 3))
