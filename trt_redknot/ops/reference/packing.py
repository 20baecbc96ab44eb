"""Packed FP8 rows, in plain torch: what the CUDA packers and readers are compared with.

Latent row of `head_dim` channels, the last `rope_dim` of them rotated (584 bytes for 448 + 64):

    nope channels as e4m3 | rope channels as bf16 | one ue8m0 scale per 64 nope channels | zero pad to 8 bytes

In a pool zeros follow up to a multiple of 64 bytes (640), so that every row begins where a pair of memory sectors does
and can be copied 16 bytes at a time. In files rows follow each other.

Plain row of `width` channels (Local contribution, indexer keys):

    channels as e4m3 | zero pad to 4 bytes | one fp32 scale per 128 channels

Scales are powers of two, the smallest that brings the largest finite magnitude of their channels to at most 448, so
that a code times its scale is exact in fp32 (and in bf16, down to its smallest normal value). Rounding is to nearest
even. Channels that are not finite become NaN and do not disturb the scale; magnitudes above 1.875 * 2**127 become that;
an all-zero block has scale 1. Scales never go below 2**-126: the error of a subnormal block is at most 2**-136.
"""

from __future__ import annotations

import torch

LATENT_BLOCK = 64
POOL_ALIGNMENT = 64
ROW_BLOCK = 128
E4M3_MAX = 448.0
_UE8M0_BIAS = 127
_LEAST_EXPONENT = -126
# The largest fp32 with e4m3's mantissa: what lies above would round to infinity.
_LARGEST = 1.875 * 2.0**127


def latent_row_bytes(head_dim: int, rope_dim: int) -> int:
    """Bytes of one packed latent row."""
    nope = head_dim - rope_dim
    return _ceil_to(nope + 2 * rope_dim + _blocks(nope, LATENT_BLOCK), 8)


def latent_pitch(head_dim: int, rope_dim: int) -> int:
    """Bytes from one packed latent row of a pool to the next."""
    return _ceil_to(latent_row_bytes(head_dim, rope_dim), POOL_ALIGNMENT)


def row_bytes(width: int) -> int:
    """Bytes of one packed plain row."""
    return _ceil_to(width, 4) + 4 * _blocks(width, ROW_BLOCK)


def pack_latents(latents: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Pack latents [n, head_dim] (any float dtype) into uint8 [n, latent_row_bytes]."""
    rows, head_dim = latents.shape
    nope = head_dim - rope_dim
    assert 0 <= rope_dim <= head_dim, f"{rope_dim} rope channels in a latent of {head_dim}"
    codes, exponents = _quantise(latents[:, :nope].float(), LATENT_BLOCK)
    rope = _as(latents[:, nope:].to(torch.bfloat16), torch.uint8)
    scales = (exponents + _UE8M0_BIAS).to(torch.uint8)
    pad = latent_row_bytes(head_dim, rope_dim) - nope - 2 * rope_dim - scales.shape[1]
    return torch.cat((codes, rope, scales, codes.new_zeros((rows, pad))), dim=1)


def unpack_latents(packed: torch.Tensor, head_dim: int, rope_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Latents [n, head_dim] of `dtype` from uint8 [n, latent_row_bytes]."""
    nope = head_dim - rope_dim
    assert packed.dtype is torch.uint8, packed.dtype
    assert packed.shape[1] == latent_row_bytes(head_dim, rope_dim), tuple(packed.shape)
    rope_end = nope + 2 * rope_dim
    scales = packed[:, rope_end : rope_end + _blocks(nope, LATENT_BLOCK)]
    values = _dequantise(packed[:, :nope], _as(scales, torch.float8_e8m0fnu).float(), LATENT_BLOCK)
    rope = _as(packed[:, nope:rope_end], torch.bfloat16)
    return torch.cat((values.to(dtype), rope.to(dtype)), dim=1)


def pack_pool_latents(latents: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """The same as rows of a pool: uint8 [n, latent_pitch]."""
    packed = pack_latents(latents, rope_dim)
    return torch.nn.functional.pad(packed, (0, latent_pitch(latents.shape[1], rope_dim) - packed.shape[1]))


def unpack_pool_latents(stored: torch.Tensor, head_dim: int, rope_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Latents [n, head_dim] of `dtype` from rows of a pool, uint8 [n, latent_pitch]."""
    assert stored.shape[1] == latent_pitch(head_dim, rope_dim), tuple(stored.shape)
    return unpack_latents(stored[:, : latent_row_bytes(head_dim, rope_dim)], head_dim, rope_dim, dtype)


def pack_rows(values: torch.Tensor) -> torch.Tensor:
    """Pack rows [n, width] (any float dtype) into uint8 [n, row_bytes(width)]."""
    rows, width = values.shape
    codes, exponents = _quantise(values.float(), ROW_BLOCK)
    pad = codes.new_zeros((rows, _ceil_to(width, 4) - width))
    return torch.cat((codes, pad, _as(_power_of_two(exponents), torch.uint8)), dim=1)


def unpack_rows(packed: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, width] of `dtype` from uint8 [n, row_bytes(width)]."""
    assert packed.dtype is torch.uint8, packed.dtype
    assert packed.shape[1] == row_bytes(width), tuple(packed.shape)
    scales = _as(packed[:, _ceil_to(width, 4) :], torch.float32)
    return _dequantise(packed[:, :width], scales, ROW_BLOCK).to(dtype)


def _quantise(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, width] and scale exponents int32 [n, blocks] of fp32 rows."""
    rows, width = values.shape
    finite = torch.isfinite(values)
    values = values.clamp(-_LARGEST, _LARGEST)
    magnitude = torch.where(finite, values, 0.0).abs()
    padded = torch.nn.functional.pad(magnitude, (0, _ceil_to(width, block) - width))
    peak = padded.reshape(rows, _blocks(width, block), block).amax(dim=2)
    # frexp: peak = mantissa * 2**exponent with mantissa in [0.5, 1), and 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(peak)
    exponents = (exponent - 9 + (mantissa > 0.875)).clamp(min=_LEAST_EXPONENT)
    exponents = torch.where(peak == 0, 0, exponents).int()
    scaled = values * _spread(_power_of_two(-exponents), width, block)
    codes = torch.where(finite, scaled, torch.nan).to(torch.float8_e4m3fn)
    return _as(codes, torch.uint8), exponents


def _dequantise(codes: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    values = _as(codes, torch.float8_e4m3fn).float()
    return values * _spread(scales, codes.shape[1], block)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """fp32 2**e for int32 e from -126 to 127, from its bits: a power function may be off by a rounding."""
    return ((exponents + 127) << 23).contiguous().view(torch.float32)


def _as(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of [n, k] as `dtype`, for any offset and stride, and for no bytes at all."""
    if not values.numel():
        width = values.shape[1] * values.element_size() // dtype.itemsize
        return torch.empty((values.shape[0], width), dtype=dtype, device=values.device)
    return values.clone(memory_format=torch.contiguous_format).view(dtype)


def _spread(per_block: torch.Tensor, width: int, block: int) -> torch.Tensor:
    return per_block.repeat_interleave(block, dim=1)[:, :width]


def _blocks(width: int, block: int) -> int:
    return -(-width // block)


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
