"""The cache pool: latents, compressed entries, Indexer keys and raw compressor tails of the sequences of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.request.segments import Segment, SegmentKind


@dataclass(kw_only=True)
class SequenceState:
    """One request's place in the pool. Its latents, and its entries of each ratio, are consecutive pool rows.

    Attributes:
        slot: row of the raw tails.
        latent_offset: pool row of the request's first token.
        entry_offsets: by ratio, pool row of the first entry.
        segments: the segment table; the last fresh segment grows as tokens are generated.
    """

    slot: int
    latent_offset: int
    entry_offsets: dict[int, int]
    segments: list[Segment] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def append_token(self) -> None:
        """Grow by one generated token: the last segment if it is fresh, else a new fresh one."""
        last = self.segments[-1]
        if last.kind is SegmentKind.FRESH:
            grown = Segment(index=last.index, kind=last.kind, start=last.start, length=last.length + 1)
            self.segments[-1] = grown
        else:
            self.segments.append(Segment(index=last.index + 1, kind=SegmentKind.FRESH, start=last.stop, length=1))


def tail_rows(kind: AttentionKind, ratio: int) -> int:
    """Raw rows kept for decoding: an unfinished window, and for CSA the window before it."""
    return {AttentionKind.SLIDING: 0, AttentionKind.CSA: 2 * ratio, AttentionKind.HCA: ratio}[kind]


def raw_widths(geometry: ModelGeometry, layer: int) -> tuple[int, ...]:
    """Channels of the raw rows of a layer: kv and gate of the compressor, then of the Indexer."""
    kind = geometry.attention_kinds[layer]
    if kind is AttentionKind.SLIDING:
        return ()
    if kind is AttentionKind.HCA:
        return (geometry.head_dim, geometry.head_dim)
    return (2 * geometry.head_dim, 2 * geometry.head_dim, 2 * geometry.index_dim, 2 * geometry.index_dim)


class CachePool:
    """Cache of a batch of sequences, one set of tensors a layer.

    Args:
        geometry: the network.
        lengths: tokens each sequence may grow to.
        segments: segments each sequence starts with (every one may end in a partial window).
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        lengths: Sequence[int],
        segments: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.sequences: list[SequenceState] = []
        ratios = {geometry.ratio(layer) for layer in range(geometry.layers)} - {0}
        latent_rows, entry_rows = 0, dict.fromkeys(ratios, 0)
        for slot, (length, pieces) in enumerate(zip(lengths, segments, strict=True)):
            self.sequences.append(SequenceState(slot=slot, latent_offset=latent_rows, entry_offsets=dict(entry_rows)))
            latent_rows += length
            for ratio in ratios:
                entry_rows[ratio] += length // ratio + pieces + 1
        # Memory that no row has written holds NaN: a read of it would be seen.
        self.latents = [
            torch.full((latent_rows, geometry.head_dim), float("nan"), dtype=dtype, device=device)
            for _ in range(geometry.layers)
        ]
        self.entries: list[torch.Tensor | None] = []
        self.index_keys: list[torch.Tensor | None] = []
        self.tails: list[tuple[torch.Tensor, ...]] = []
        for layer, kind in enumerate(geometry.attention_kinds):
            ratio = geometry.ratio(layer)
            rows = entry_rows.get(ratio, 0)
            self.entries.append(
                torch.full((rows, geometry.head_dim), float("nan"), dtype=dtype, device=device) if ratio else None
            )
            self.index_keys.append(
                torch.full((rows, geometry.index_dim), float("nan"), dtype=dtype, device=device)
                if kind is AttentionKind.CSA
                else None
            )
            keep = tail_rows(kind, ratio) * len(self.sequences)
            self.tails.append(
                tuple(
                    torch.full((keep, width), float("nan"), dtype=dtype, device=device)
                    for width in raw_widths(geometry, layer)
                )
            )
