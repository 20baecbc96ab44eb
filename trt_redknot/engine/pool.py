"""The cache pool: latents, compressed entries, Indexer keys and raw compressor tails of the sequences that are open."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.cache_rows import CacheRows, forget
from trt_redknot.engine.ranges import Ranges
from trt_redknot.request.segments import Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class PoolRows:
    """Rows of a pool, or of one sequence in it.

    Attributes:
        latents: one a token.
        entries: by compression ratio.
        sequences: how many, each with its place in the raw tails.
    """

    latents: int
    entries: Mapping[int, int]
    sequences: int

    @classmethod
    def of_sequence(cls, geometry: ModelGeometry, length: int, segments: int) -> PoolRows:
        """What a sequence needs that starts with `segments` segments and grows to `length` tokens."""
        ratios = {geometry.ratio(layer) for layer in range(geometry.layers)} - {0}
        # Every segment may end in a partial window, and one more may be opened for generated tokens.
        return cls(
            latents=length, entries={ratio: length // ratio + segments + 1 for ratio in sorted(ratios)}, sequences=1
        )

    @classmethod
    def sum(cls, parts: Sequence[PoolRows]) -> PoolRows:
        ratios = sorted({ratio for part in parts for ratio in part.entries})
        return cls(
            latents=sum(part.latents for part in parts),
            entries={ratio: sum(part.entries.get(ratio, 0) for part in parts) for ratio in ratios},
            sequences=sum(part.sequences for part in parts),
        )

    def within(self, other: PoolRows) -> bool:
        """Whether `other` has at least as many rows of each kind."""
        return (
            self.latents <= other.latents
            and self.sequences <= other.sequences
            and all(rows <= other.entries.get(ratio, 0) for ratio, rows in self.entries.items())
        )


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

    def grown(self) -> SequenceState:
        """The same place with one more generated token; this one stays as it is."""
        longer = dataclasses.replace(self, segments=list(self.segments))
        longer.append_token()
        return longer


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
    """Cache of the open sequences, one set of tensors a layer. Its size is fixed, sequences come and go.

    Rows that no open sequence has written hold NaN, so that a read of them would be seen: all rows at first, and those
    of a sequence again when it is closed. Places depend on nothing but the order of the calls: they are the same on
    every rank.

    Args:
        geometry: the network.
        capacity: rows of each kind.
        packed: latents, entries and Indexer keys are packed FP8 rows.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        capacity: PoolRows,
        *,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool = False,
    ) -> None:
        self.geometry = geometry
        self.rows = cache = CacheRows(geometry=geometry, dtype=dtype, packed=packed)
        self.capacity = capacity
        self._latents = Ranges(capacity.latents)
        self._entries = {ratio: Ranges(rows) for ratio, rows in capacity.entries.items()}
        self._slots = Ranges(capacity.sequences)
        # By slot, what the open sequences take.
        self._open: dict[int, PoolRows] = {}

        def nothing(rows: int, width: int) -> torch.Tensor:
            return torch.full((rows, width), float("nan"), dtype=dtype, device=device)

        self.latents = [cache.nothing(Part.LATENTS, capacity.latents, device) for _ in range(geometry.layers)]
        self.entries: list[torch.Tensor | None] = []
        self.index_keys: list[torch.Tensor | None] = []
        self.tails: list[tuple[torch.Tensor, ...]] = []
        for layer, kind in enumerate(geometry.attention_kinds):
            ratio = geometry.ratio(layer)
            rows = capacity.entries.get(ratio, 0)
            keep = tail_rows(kind, ratio) * capacity.sequences
            self.entries.append(cache.nothing(Part.ENTRIES, rows, device) if ratio else None)
            keys = cache.nothing(Part.INDEX_KEYS, rows, device) if kind is AttentionKind.CSA else None
            self.index_keys.append(keys)
            self.tails.append(tuple(nothing(keep, width) for width in raw_widths(geometry, layer)))

    @property
    def free(self) -> PoolRows:
        """Rows that no sequence has; they need not be consecutive."""
        entries = {ratio: ranges.free for ratio, ranges in self._entries.items()}
        return PoolRows(latents=self._latents.free, entries=entries, sequences=self._slots.free)

    def has_room(self, size: PoolRows) -> bool:
        """Whether a sequence of this size can be opened now. A sequence's rows of a kind are consecutive."""
        entries = {ratio: ranges.longest for ratio, ranges in self._entries.items()}
        gaps = PoolRows(latents=self._latents.longest, entries=entries, sequences=self._slots.longest)
        return size.within(gaps)

    def open(self, size: PoolRows, segments: Sequence[Segment]) -> SequenceState:
        """A place for a sequence that starts with `segments`. ValueError where there is none: ask `has_room` before."""
        if not self.has_room(size):
            raise ValueError(f"no room for {size}, free are {self.free}")
        slot = self._slots.take(1)
        self._open[slot] = size
        return SequenceState(
            slot=slot,
            latent_offset=self._latents.take(size.latents),
            entry_offsets={ratio: self._entries[ratio].take(rows) for ratio, rows in size.entries.items()},
            segments=list(segments),
        )

    def close(self, state: SequenceState) -> None:
        """Give a sequence's rows back, with NaN in them again. KeyError where it is closed already."""
        size = self._open.pop(state.slot)
        for layer, kind in enumerate(self.geometry.attention_kinds):
            ratio = self.geometry.ratio(layer)
            forget(self.latents[layer], state.latent_offset, size.latents)
            for table in (self.entries[layer], self.index_keys[layer]):
                if table is not None:
                    forget(table, state.entry_offsets[ratio], size.entries[ratio])
            keep = tail_rows(kind, ratio)
            for tail in self.tails[layer]:
                forget(tail, state.slot * keep, keep)
        self._slots.give(state.slot, 1)
        self._latents.give(state.latent_offset, size.latents)
        for ratio, rows in size.entries.items():
            self._entries[ratio].give(state.entry_offsets[ratio], rows)
