"""Packed FP8 rows: layout, error bounds, exactness where it is promised, values that are not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.ops.reference.packing import (
    E4M3_MAX,
    LATENT_BLOCK,
    ROW_BLOCK,
    latent_pitch,
    latent_row_bytes,
    pack_latents,
    pack_pool_latents,
    pack_rows,
    row_bytes,
    unpack_latents,
    unpack_pool_latents,
    unpack_rows,
)

SIZES = st.tuples(st.integers(0, 9), st.integers(0, 300), st.integers(0, 40))
SEEDS = st.integers(0, 2**31)
# e4m3 has three mantissa bits: half a step is 1/16 of the power of two below a value.
RELATIVE = 2.0**-4
# Scaled values below 2**-6 are subnormal codes, spaced by 2**-9.
HALF_SUBNORMAL = 2.0**-10


def random_values(rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randint(-30, 31, (rows, width), generator=generator)
    return torch.ldexp(torch.randn((rows, width), generator=generator), magnitudes)


def block_scales(values: torch.Tensor, block: int) -> torch.Tensor:
    """Per channel, an upper bound of its block's scale: the power of two at or above peak / 448, by doubling."""
    bounds = torch.ones_like(values)
    for start in range(0, values.shape[1], block):
        for row in range(values.shape[0]):
            peak = float(values[row, start : start + block].abs().max())
            scale = 2.0**-126
            while scale * E4M3_MAX < peak:
                scale *= 2
            bounds[row, start : start + block] = scale
    return bounds


def assert_close(found: torch.Tensor, wanted: torch.Tensor, block: int) -> None:
    bound = torch.maximum(wanted.abs() * RELATIVE, block_scales(wanted, block) * HALF_SUBNORMAL)
    assert ((found - wanted).abs() <= bound).all()


def test_the_released_geometry_takes_584_bytes() -> None:
    assert latent_row_bytes(512, 64) == 448 + 128 + 7 + 1
    assert pack_latents(torch.zeros(3, 512), 64).shape == (3, 584)
    assert row_bytes(1024) == 1024 + 8 * 4


@settings(deadline=None, max_examples=60)
@given(SIZES, SEEDS)
def test_rows_of_a_pool_are_packed_latents_and_zeros(sizes: tuple[int, int, int], seed: int) -> None:
    rows, nope, rope = sizes
    values = random_values(rows, nope + rope, seed)
    packed, stored = pack_latents(values, rope), pack_pool_latents(values, rope)
    pitch = latent_pitch(nope + rope, rope)
    assert latent_pitch(512, 64) == 640
    assert pitch % 64 == 0
    assert pitch - 64 < packed.shape[1] <= pitch
    assert stored.shape == (rows, pitch)
    assert torch.equal(stored[:, : packed.shape[1]], packed)
    assert not stored[:, packed.shape[1] :].any()
    back = unpack_pool_latents(stored, nope + rope, rope, torch.float32)
    assert torch.equal(back, unpack_latents(packed, nope + rope, rope, torch.float32))


@settings(deadline=None, max_examples=60)
@given(SIZES, SEEDS)
def test_latents_come_back_within_half_a_step(sizes: tuple[int, int, int], seed: int) -> None:
    rows, nope, rope = sizes
    values = random_values(rows, nope + rope, seed)
    packed = pack_latents(values, rope)
    assert packed.dtype is torch.uint8
    assert packed.shape == (rows, latent_row_bytes(nope + rope, rope))
    assert latent_row_bytes(nope + rope, rope) % 8 == 0
    found = unpack_latents(packed, nope + rope, rope, torch.float32)
    assert_close(found[:, :nope], values[:, :nope], LATENT_BLOCK)
    assert torch.equal(found[:, nope:], values[:, nope:].to(torch.bfloat16).float())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 500), SEEDS)
def test_rows_come_back_within_half_a_step(rows: int, width: int, seed: int) -> None:
    values = random_values(rows, width, seed)
    packed = pack_rows(values)
    assert packed.shape == (rows, row_bytes(width))
    assert_close(unpack_rows(packed, width, torch.float32), values, ROW_BLOCK)


@settings(deadline=None, max_examples=40)
@given(SIZES, SEEDS)
def test_packing_twice_changes_nothing(sizes: tuple[int, int, int], seed: int) -> None:
    rows, nope, rope = sizes
    packed = pack_latents(random_values(rows, nope + rope, seed), rope)
    for dtype in (torch.float32, torch.bfloat16):
        # A code times a power of two is exact in bf16 too, so both dtypes give the same bytes again.
        again = unpack_latents(packed, nope + rope, rope, dtype)
        assert torch.equal(unpack_latents(pack_latents(again, rope), nope + rope, rope, dtype), again)
    if nope:
        codes = pack_rows(unpack_latents(packed, nope + rope, rope, torch.float32)[:, :nope])
        once = unpack_rows(codes, nope, torch.bfloat16)
        assert torch.equal(unpack_rows(pack_rows(once), nope, torch.bfloat16), once)


def test_every_code_survives_with_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    finite = values[torch.isfinite(values)]
    for exponent in range(-117, 119):
        # 448 is among the values, so the scale is exactly 2**exponent and every value is a code.
        scaled = torch.ldexp(finite, torch.tensor(exponent))[None]
        wide = torch.cat((scaled, scaled[:, : 2 * ROW_BLOCK - scaled.shape[1]]), dim=1)
        wide[:, ROW_BLOCK - 1] = wide[:, -1] = E4M3_MAX * 2.0**exponent
        assert torch.equal(unpack_rows(pack_rows(wide), wide.shape[1], torch.float32), wide)
        assert torch.equal(
            unpack_latents(pack_latents(wide.repeat(1, 1), 0), wide.shape[1], 0, torch.float32)[:, -1:], wide[:, -1:]
        )


def test_rounding_is_to_nearest_even() -> None:
    # Halfway between 1.0 and 1.125, and between 1.125 and 1.25, beside a value that fixes the scale at 1.
    values = torch.tensor([[448.0, 1.0625, 1.1875, -1.0625, -1.1875]])
    assert unpack_rows(pack_rows(values), 5, torch.float32).tolist() == [[448.0, 1.0, 1.25, -1.0, -1.25]]


def test_scales_are_per_block_and_as_small_as_they_may_be() -> None:
    values = torch.zeros(1, 128)
    values[0, 0], values[0, 64] = 448.0, 449.0
    packed = pack_latents(torch.cat((values, torch.zeros(1, 2)), dim=1), 2)
    scales = packed[0, 128 + 4 : 128 + 6].tolist()
    assert scales == [127, 128]
    assert packed[0, 128 + 6 :].tolist() == [0] * (packed.shape[1] - 134)


@pytest.mark.parametrize("extreme", [1e-45, 1e-40, 2.0**-126, 3e38, torch.finfo(torch.float32).max])
def test_tiny_and_huge_rows_stay_finite(extreme: float) -> None:
    values = torch.tensor([[extreme, -extreme, 0.0, extreme / 2]])
    found = unpack_rows(pack_rows(values), 4, torch.float32)
    assert torch.isfinite(found).all()
    assert_close(found, values, ROW_BLOCK)
    latents = unpack_latents(pack_latents(values, 0), 4, 0, torch.float32)
    assert torch.equal(latents, found)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(4, 200)
    assert torch.equal(unpack_rows(pack_rows(zeros), 200, torch.float32), zeros)
    assert torch.equal(unpack_latents(pack_latents(zeros, 20), 200, 20, torch.bfloat16), zeros.bfloat16())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_becomes_nan_and_disturbs_nobody(poison: float) -> None:
    values = random_values(2, 130, 7)
    poisoned = values.clone()
    poisoned[0, 3] = poison
    found = unpack_rows(pack_rows(poisoned), 130, torch.float32)
    assert torch.isnan(found[0, 3])
    found[0, 3] = 0.0
    values[0, 3] = 0.0
    assert torch.equal(found, unpack_rows(pack_rows(values), 130, torch.float32))
    rope = torch.tensor([[0.0, poison]])
    back = unpack_latents(pack_latents(rope, 1), 2, 1, torch.float32)
    assert torch.equal(back.isnan(), rope.isnan())


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_the_dtype_of_the_input_does_not_matter(seed: int) -> None:
    values = random_values(5, 96, seed).to(torch.bfloat16)
    assert torch.equal(pack_latents(values, 16), pack_latents(values.double(), 16))
    assert torch.equal(pack_rows(values), pack_rows(values.float()))
