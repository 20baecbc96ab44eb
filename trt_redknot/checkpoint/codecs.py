"""Block formats of weights: FP8 e4m3 in 128x128 blocks, FP4 e2m1 in 32-wide blocks; scales are ue8m0 or fp32.

A value is its code times the scale of its block; a ue8m0 scale is a power of two. Rounding is to nearest, ties to the
even code. Quantisers choose the smallest power of two that keeps a block's largest value in range: nothing saturates.
"""

from __future__ import annotations

from itertools import pairwise

import torch

FP8_BLOCK = 128
FP4_BLOCK = 32

_FP8_MAX_EXPONENT = 9  # largest e4m3 value: 448 = 0.875 * 2^9
_FP8_MAX_FRACTION = 0.875
_FP4_MAX_EXPONENT = 3  # largest e2m1 value: 6 = 0.75 * 2^3
_FP4_MAX_FRACTION = 0.75
_UE8M0_BIAS = 127
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_values() -> torch.Tensor:
    """fp32 [16]: the value of every e2m1 code; codes 8 to 15 are negative, 8 is minus zero."""
    magnitudes = torch.tensor(_FP4_MAGNITUDES, dtype=torch.float32)
    return torch.cat([magnitudes, -magnitudes])


def dequantize_fp8(
    codes: torch.Tensor, scales: torch.Tensor, *, first_row: int = 0, first_column: int = 0
) -> torch.Tensor:
    """A rectangle of a block-scaled matrix.

    Args:
        codes: float8_e4m3fn [rows, columns].
        scales: float8_e8m0fnu or fp32 [blocks down, blocks across]: the blocks that the rectangle touches.
        first_row: row of the matrix that `codes` starts at; need not be a multiple of 128.
        first_column: column of the matrix that `codes` starts at.

    Returns:
        fp32 [rows, columns].
    """
    rows, columns = codes.shape
    across = (torch.arange(first_column, first_column + columns) // FP8_BLOCK) - first_column // FP8_BLOCK
    factors = scales.to(torch.float32)[:, across]
    weights = codes.to(torch.float32)
    # Block row by block row, so that no scale matrix as large as the weights is built.
    top = first_row % FP8_BLOCK
    for block in range(-(-(top + rows) // FP8_BLOCK)):
        weights[max(block * FP8_BLOCK - top, 0) : (block + 1) * FP8_BLOCK - top].mul_(factors[block])
    return weights


def dequantize_fp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP4 rows, two codes a byte, the low nibble first.

    Args:
        codes: uint8 or int8 [rows, columns / 2].
        scales: float8_e8m0fnu or fp32 [rows, ceil(columns / 32)].

    Returns:
        fp32 [rows, columns].
    """
    rows, half = codes.shape
    # Both codes of a byte at once, as one 8-byte item: several times faster than gathering and interleaving them.
    values = fp4_values()
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.float64).flatten()
    indices = codes.view(torch.uint8).to(torch.int32).flatten()
    weights = pairs.index_select(0, indices).view(torch.float32).view(rows, 2 * half)
    full, rest = divmod(2 * half, FP4_BLOCK)
    factors = scales.to(torch.float32)
    weights[:, : full * FP4_BLOCK].view(rows, full, FP4_BLOCK).mul_(factors[:, :full, None])
    if rest:
        weights[:, full * FP4_BLOCK :].mul_(factors[:, full:])
    return weights


def quantize_fp8_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 e4m3 with one ue8m0 scale per 128x128 block.

    Args:
        weights: [rows, columns], any float dtype, finite.

    Returns:
        codes float8_e4m3fn [rows, columns], scales float8_e8m0fnu [ceil(rows / 128), ceil(columns / 128)].

    Raises:
        ValueError: a weight is not finite.
    """
    rows, columns = weights.shape
    values = _finite_fp32(weights)
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = torch.nn.functional.pad(values, (0, across * FP8_BLOCK - columns, 0, down * FP8_BLOCK - rows))
    blocks = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    exponents = _scale_exponents(blocks.abs().amax(dim=(1, 3)), _FP8_MAX_FRACTION, _FP8_MAX_EXPONENT)
    scaled = blocks * _ue8m0(-exponents).to(torch.float32)[:, None, :, None]
    codes = scaled.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    return codes, _ue8m0(exponents)


def quantize_fp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP4 e2m1 with one ue8m0 scale per 32 columns of a row.

    Args:
        weights: [rows, columns], any float dtype, finite, `columns` even.

    Returns:
        codes uint8 [rows, columns / 2] (low nibble first), scales float8_e8m0fnu [rows, ceil(columns / 32)].

    Raises:
        ValueError: a weight is not finite, or `columns` is odd.
    """
    rows, columns = weights.shape
    if columns % 2:
        raise ValueError(f"FP4 packs two columns a byte, expected an even number of columns, found {columns}")
    values = _finite_fp32(weights)
    across = -(-columns // FP4_BLOCK)
    blocks = torch.nn.functional.pad(values, (0, across * FP4_BLOCK - columns)).view(rows, across, FP4_BLOCK)
    exponents = _scale_exponents(blocks.abs().amax(dim=2), _FP4_MAX_FRACTION, _FP4_MAX_EXPONENT)
    codes = _fp4_codes(blocks * _ue8m0(-exponents).to(torch.float32)[:, :, None]).view(rows, -1)[:, :columns]
    return codes[:, 0::2] | (codes[:, 1::2] << 4), _ue8m0(exponents)


def repack_fp4_to_fp8(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP4 rows as FP8 blocks, rounding to nearest even; exact where a block's FP4 scales lie within 2^14 of each other.

    Args and returns are those of :func:`dequantize_fp4` and :func:`quantize_fp8_blocks`.
    """
    return quantize_fp8_blocks(dequantize_fp4(codes, scales))


def _finite_fp32(weights: torch.Tensor) -> torch.Tensor:
    values = weights.to(torch.float32)
    if not bool(torch.isfinite(values).all()):
        raise ValueError("block formats hold finite weights only, found NaN or infinity")
    return values


def _scale_exponents(largest: torch.Tensor, max_fraction: float, max_exponent: int) -> torch.Tensor:
    """Smallest k, as int32, with largest / 2^k in range; 0 for blocks of zeros. Exact: no logarithm is rounded."""
    fraction, exponent = torch.frexp(largest)
    needed = exponent - max_exponent + (fraction > max_fraction).to(torch.int32)
    return torch.where(largest == 0, 0, needed).clamp(-_UE8M0_BIAS, _UE8M0_BIAS)


def _ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponent. Widened to fp32 it is exact, which a vectorised pow or ldexp is not bound to be."""
    return (exponents + _UE8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code of values already in range, ties to the even code."""
    magnitude = values.abs()
    codes = torch.where(torch.signbit(values), 8, 0).to(torch.uint8)
    for lower, (below, above) in enumerate(pairwise(_FP4_MAGNITUDES)):
        middle = (below + above) / 2
        codes += (magnitude >= middle) if lower % 2 else (magnitude > middle)
    return codes
