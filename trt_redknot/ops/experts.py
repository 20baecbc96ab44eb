"""Expert weights in FP8, as the grouped products of every backend read them: e4m3 codes, a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Rows and columns of an expert's weight that share a scale.
EXPERT_BLOCK = 128
# Scales do not go below this, so that an all-zero block has one.
_LEAST_PEAK = 2.0**-100


@dataclass(frozen=True, kw_only=True)
class QuantisedExperts:
    """Weights of several experts. A weight is its code times the scale of its block.

    Attributes:
        codes: e4m3 [E, N, K]; N and K are multiples of 128.
        scales: fp32 [E, K / 128, N / 128].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """[E, N, K], as that of plain weights."""
        return self.codes.shape

    def expert(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The weight of one expert: [N, K] of `dtype`."""
        spread = self.scales[index].T.repeat_interleave(EXPERT_BLOCK, 0).repeat_interleave(EXPERT_BLOCK, 1)
        return (self.codes[index].float() * spread).to(dtype)


def quantise_experts(weight: torch.Tensor) -> QuantisedExperts:
    """[E, N, K] in FP8: for every block of 128 x 128 the least power of two that brings its largest magnitude to at
    most 448 is the scale; codes are rounded to nearest even.

    A block with an infinity or NaN has a scale that is not finite; every other block's scale is.
    """
    experts, width, depth = weight.shape
    blocks = weight.float().view(experts, width // EXPERT_BLOCK, EXPERT_BLOCK, depth // EXPERT_BLOCK, EXPERT_BLOCK)
    peak = blocks.abs().amax(dim=(2, 4)).clamp(min=_LEAST_PEAK)
    scale = torch.exp2(torch.ceil(torch.log2(peak / 448)))
    codes = (blocks / scale[:, :, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantisedExperts(codes=codes.view(experts, width, depth), scales=scale.transpose(1, 2).contiguous())
