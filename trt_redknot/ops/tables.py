"""Tables that tell the ops where a row's keys lie. Plain tensors, built once a step, the same for all layers of a
kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Columns of AttentionTable.segments.
START, STOP, LATENT_OFFSET, ENTRY_OFFSET, ENTRY_COUNT = range(5)


@dataclass(frozen=True, kw_only=True)
class AttentionTable:
    """Where the keys of R rows lie in the cache pool, for layers with one compression ratio.

    Attributes:
        segments: int64 [segments, 5]: request position of the first token (the origin of the frame that its latents,
            entries and keys are in), of the first token after it, pool row of its first latent, pool row of its first
            entry, entries. Segments of one sequence are consecutive, and so are their entries in the pool. The engine's
            sequences are one segment each.
        row_segments: int64 [R, 2]: first segment of the row's sequence, and one past its last.
        positions: int64 [R]: request position of the row.
        visible: int64 [R]: compressed entries the row may see, counted from the first entry of its sequence.
    """

    segments: torch.Tensor
    row_segments: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor

    def rows(self, rows: slice | torch.Tensor) -> AttentionTable:
        """The table of some of the rows."""
        return AttentionTable(
            segments=self.segments,
            row_segments=self.row_segments[rows],
            positions=self.positions[rows],
            visible=self.visible[rows],
        )


@dataclass(frozen=True, kw_only=True)
class CompressTable:
    """Which compressed entries a step writes, and from which raw rows each is pooled.

    Attributes:
        entries: int64 [E]: pool rows to write.
        slots: int64 [E, w * ratio]: rows of the raw projections, -1 where there is none. CSA (w = 2): the window
            before, then the window itself. HCA (w = 1): the window itself.
        positions: int64 [E]: position of the window's first token, by which the entry is turned.
    """

    entries: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
