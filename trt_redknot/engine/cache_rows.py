"""How rows of latents, compressed entries and Indexer keys lie in a cache pool: as numbers, or as packed FP8 rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.ops.reference.packing import (
    latent_pitch,
    pack_pool_latents,
    pack_rows,
    row_bytes,
    unpack_pool_latents,
    unpack_rows,
)

# In every byte: NaN as e4m3, as bf16 and as a scale.
_NOTHING = 0xFF


@dataclass(frozen=True, kw_only=True)
class CacheRows:
    """The rows of one engine's pools. Packing is exact for rows that were packed before, such as an FP8 artifact's.

    Attributes:
        dtype: what the engine computes in.
        packed: packed FP8 rows (:mod:`trt_redknot.ops.reference.packing`), uint8; else numbers of `dtype`.
    """

    geometry: ModelGeometry
    dtype: torch.dtype
    packed: bool = False

    def nothing(self, part: Part, rows: int, device: torch.device) -> torch.Tensor:
        """Rows that nobody has written: NaN."""
        width = self._width(part)
        if not self.packed:
            return torch.full((rows, width), float("nan"), dtype=self.dtype, device=device)
        size = row_bytes(width) if part is Part.INDEX_KEYS else latent_pitch(width, self.geometry.rope_dim)
        return torch.full((rows, size), _NOTHING, dtype=torch.uint8, device=device)

    def stored(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """Numbers as rows of the pool."""
        if not self.packed:
            return values
        return pack_rows(values) if part is Part.INDEX_KEYS else pack_pool_latents(values, self.geometry.rope_dim)

    def values(self, part: Part, stored: torch.Tensor) -> torch.Tensor:
        """Rows of the pool as numbers."""
        if not self.packed:
            return stored
        width = self._width(part)
        if part is Part.INDEX_KEYS:
            return unpack_rows(stored, width, self.dtype)
        return unpack_pool_latents(stored, width, self.geometry.rope_dim, self.dtype)

    def _width(self, part: Part) -> int:
        assert part in (Part.LATENTS, Part.ENTRIES, Part.INDEX_KEYS), part
        return self.geometry.index_dim if part is Part.INDEX_KEYS else self.geometry.head_dim


def forget(table: torch.Tensor, start: int, rows: int) -> None:
    """Put NaN into rows of a pool's table."""
    table[start : start + rows] = _NOTHING if table.dtype is torch.uint8 else float("nan")
