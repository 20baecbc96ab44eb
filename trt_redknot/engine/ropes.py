"""cos and sin of every position a request reaches, by kind of layer. Grown on demand, never shrunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.rope import inverse_frequencies
from trt_redknot.ops.reference.numerics import rope_table, wide

_FIRST_POSITIONS = 4096


class RopeTables(Mapping[AttentionKind, torch.Tensor]):
    """Tables [positions, P / 2, 2] by attention kind, in the dtype that sums are kept in."""

    def __init__(self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> None:
        self._geometry = geometry
        self._dtype = wide(dtype)
        self._device = device
        self._tables: dict[AttentionKind, torch.Tensor] = {}
        self._positions = 0
        self.grow(_FIRST_POSITIONS)

    def grow(self, positions: int) -> None:
        """Make sure that positions 0 .. positions - 1 are there."""
        if positions <= self._positions:
            return
        self._positions = max(positions, 2 * self._positions)
        for kind in AttentionKind:
            rope = self._geometry.rope_sliding if kind is AttentionKind.SLIDING else self._geometry.rope_compressed
            table = rope_table(
                inverse_frequencies(rope), self._positions, factor=rope.attention_factor, dtype=self._dtype
            )
            self._tables[kind] = table.to(self._device)

    def __getitem__(self, kind: AttentionKind) -> torch.Tensor:
        return self._tables[kind]

    def __iter__(self) -> Iterator[AttentionKind]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)
