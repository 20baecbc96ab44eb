"""How tensors of an artifact are encoded on disk, by artifact format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trt_redknot.artifacts.contents import Part, PartSpec
from trt_redknot.config.geometry import ModelGeometry

# Certificates name formats, and clients read certificates: only what touches tensors waits for torch.
if TYPE_CHECKING:
    import torch


class ArtifactFormat(StrEnum):
    """FLOAT64, FLOAT32 and BFLOAT16 are exact for engines of that dtype; FP8 packs latents, indexer keys and Local."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors that are not packed and not always wide."""
        import torch

        return {
            ArtifactFormat.FLOAT64: torch.float64,
            ArtifactFormat.FLOAT32: torch.float32,
            ArtifactFormat.BFLOAT16: torch.bfloat16,
            ArtifactFormat.FP8: torch.bfloat16,
        }[self]

    @classmethod
    def exact_for(cls, dtype: torch.dtype) -> ArtifactFormat:
        """The format that keeps every bit of an engine that computes in `dtype`."""
        import torch

        return {torch.float64: cls.FLOAT64, torch.float32: cls.FLOAT32, torch.bfloat16: cls.BFLOAT16}[dtype]


_ALWAYS_WIDE = frozenset({Part.BOUNDARY, Part.SALIENCE})
_LATENT_LIKE = frozenset({Part.LATENTS, Part.ENTRIES})
_ROW_LIKE = frozenset({Part.INDEX_KEYS, Part.LOCAL})


@dataclass(frozen=True, kw_only=True)
class TensorCodec:
    """Encoding of one part in one format.

    Attributes:
        width: channels of the decoded tensor's last dimension.
        rope_dim: how many of a latent's channels are rotated.
    """

    part: Part
    format: ArtifactFormat
    width: int
    rope_dim: int

    @classmethod
    def of(cls, spec: PartSpec, form: ArtifactFormat, geometry: ModelGeometry) -> TensorCodec:
        return cls(part=spec.part, format=form, width=spec.shape[-1], rope_dim=geometry.rope_dim)

    @property
    def packed(self) -> bool:
        return self.format is ArtifactFormat.FP8 and self.part in _LATENT_LIKE | _ROW_LIKE

    @property
    def stored_dtype(self) -> torch.dtype:
        import torch

        if self.part in _ALWAYS_WIDE:
            return torch.float64 if self.format is ArtifactFormat.FLOAT64 else torch.float32
        return torch.uint8 if self.packed else self.format.dtype

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape on disk of a tensor of `shape`."""
        from trt_redknot.ops.reference.packing import latent_row_bytes, row_bytes

        if not self.packed:
            return shape
        latent = self.part in _LATENT_LIKE
        return (*shape[:-1], latent_row_bytes(self.width, self.rope_dim) if latent else row_bytes(self.width))

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as stored, on its own device, contiguous, never sharing memory with `tensor`."""
        from trt_redknot.ops.reference.packing import pack_latents, pack_rows

        if self.packed:
            return pack_latents(tensor, self.rope_dim) if self.part in _LATENT_LIKE else pack_rows(tensor)
        return tensor.detach().to(dtype=self.stored_dtype, copy=True).contiguous()

    def decode(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor as computed with, in `dtype`. May be `stored` itself where nothing has to change."""
        from trt_redknot.ops.reference.packing import unpack_latents, unpack_rows

        if not self.packed:
            return stored.to(dtype)
        if stored.is_cuda:
            unpacked = self._unpacked(stored, dtype)
            if unpacked is not None:
                return unpacked
        if self.part in _LATENT_LIKE:
            return unpack_latents(stored, self.width, self.rope_dim, dtype)
        return unpack_rows(stored, self.width, dtype)

    def _unpacked(self, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """By the kernel, which takes one launch where the reference takes a dozen; None where it does not serve."""
        import torch

        from trt_redknot.ops.cuda import packing
        from trt_redknot.ops.cuda.library import kernels_present

        if dtype is not torch.bfloat16 or not kernels_present():
            return None
        if self.part in _LATENT_LIKE:
            fits = packing.unpacks_latents(self.width, self.rope_dim)
            return packing.unpack_latents(stored.contiguous()) if fits else None
        return packing.unpack_rows(stored.contiguous(), self.width) if packing.unpacks_rows(self.width) else None
