"""The documents of an admitted request, as the prefill sees them: what is loaded, what is restored, what is pooled
again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.pool import CachePool, SequenceState, raw_widths
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.tables import ExtraRow
from trt_redknot.engine.tiles import ArtifactReader, DirectReads, Read, TileSource
from trt_redknot.observability.events import Tier
from trt_redknot.request.segments import Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Raw rows from artifacts that a row set may pool. Found once a row set, used in every layer.

    Attributes:
        pieces: by artifact, rows of its boundary tensor: int64 [k], on the host.
    """

    extras: tuple[ExtraRow, ...]
    pieces: tuple[tuple[ArtifactReader, torch.Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Cached rows to fetch and the places they go to, by artifact. Found once a chunk, used in every layer.

    Attributes:
        pieces: by artifact, its rows int64 [k], on the host, and their places int64 [k], on the device.
    """

    rows: int
    pieces: tuple[tuple[ArtifactReader, torch.Tensor, torch.Tensor], ...]


class Documents:
    """Artifacts of one sequence, by segment.

    Args:
        readers: by index of the document's segment; empty in the recompute arm.
        source: how their tensors reach the device; left out: each is read when it is asked.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        segments: Sequence[Segment],
        readers: Mapping[int, ArtifactReader],
        *,
        local_width: int,
        dtype: torch.dtype,
        device: torch.device,
        source: TileSource | None = None,
    ) -> None:
        self._geometry = geometry
        self._segments = tuple(segments)
        self._documents = [(segment, readers[segment.index]) for segment in segments if segment.index in readers]
        self._local_width = local_width
        self._dtype = dtype
        self._device = device
        self._source = source or DirectReads(dtype, device)

    @property
    def moved(self) -> Mapping[Tier, int]:
        """Bytes of artifacts read so far, by where they were found."""
        return self._source.moved

    def lateness(self) -> list[float]:
        """Seconds the computation waited, by layer; may wait for the device."""
        return self._source.lateness()

    def close(self) -> None:
        """Stop reading. The leases are the caller's."""
        self._source.close()

    def announce(
        self,
        layers: range,
        *,
        idle: bool,
        only_prefix: bool,
        boundary: Boundary,
        restorations: Sequence[Restoration],
        then: Restoration | None = None,
    ) -> None:
        """Say what the next layers will read, so that it can be on its way before they ask.

        Args:
            idle: some rows of the request do not run, so that layers are loaded.
            then: rows whose streams are filled after these layers.
        """
        parts = [
            [read for _, _, read in self._whole_parts(layer, only_prefix=only_prefix)] if idle else []
            for layer in layers
        ]
        rows = [self._row_reads(layer, boundary, restorations) for layer in layers]
        streams = [] if then is None else [self._stream_reads(then)]
        self._source.announce([*([*whole, *some] for whole, some in zip(parts, rows, strict=True)), *streams])

    def _row_reads(self, layer: int, boundary: Boundary, restorations: Sequence[Restoration]) -> list[Read]:
        reads = self._boundary_reads(layer, boundary)
        for restoration in restorations:
            reads += self._local_reads(layer, restoration)
        return reads

    def _whole_parts(self, layer: int, *, only_prefix: bool) -> Iterator[tuple[Segment, Part, Read]]:
        """What `load_layer` reads, in its order."""
        parts = {
            AttentionKind.SLIDING: (Part.LATENTS,),
            AttentionKind.HCA: (Part.LATENTS, Part.ENTRIES),
            AttentionKind.CSA: (Part.LATENTS, Part.ENTRIES, Part.INDEX_KEYS),
        }[self._geometry.attention_kinds[layer]]
        for segment, reader in self._documents:
            if only_prefix and segment.kind is not SegmentKind.PREFIX:
                continue
            for part in parts:
                yield segment, part, Read(reader=reader, part=part, layer=layer)

    def _boundary_reads(self, layer: int, boundary: Boundary) -> list[Read]:
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA:
            return []
        return [Read(reader=reader, part=Part.BOUNDARY, layer=layer, index=index) for reader, index in boundary.pieces]

    @staticmethod
    def _local_reads(layer: int, restoration: Restoration) -> list[Read]:
        return [Read(reader=reader, part=Part.LOCAL, layer=layer, index=rows) for reader, rows, _ in restoration.pieces]

    def load_layer(self, layer: int, pool: CachePool, state: SequenceState, *, only_prefix: bool) -> None:
        """Put the cached latents, entries and Indexer keys of the documents into the pool; rows that run replace
        theirs."""
        ratio = self._geometry.ratio(layer)
        for segment, part, read in self._whole_parts(layer, only_prefix=only_prefix):
            if part is Part.LATENTS:
                target: torch.Tensor | None = pool.latents[layer]
                first, count = state.latent_offset + segment.start, segment.length
            else:
                target = pool.entries[layer] if part is Part.ENTRIES else pool.index_keys[layer]
                before = sum(each.entries(ratio) for each in state.segments[: segment.index])
                first, count = state.entry_offsets[ratio] + before, segment.entries(ratio)
            assert target is not None
            target[first : first + count] = pool.rows.stored(part, self._source.take(read))

    def boundary(self, rows: RowSet) -> Boundary:
        """Last rows of documents that do not run with `rows`; their raw projections are in the artifact."""
        pieces, extras = [], []
        for segment, reader in self._documents:
            last = np.arange(max(0, segment.length - self._geometry.csa_ratio), segment.length)
            idle = last[~np.isin(segment.start + last, rows.positions)]
            if idle.size:
                pieces.append((reader, torch.from_numpy(idle - last[0])))
                exact = segment.kind is SegmentKind.PREFIX
                extras += [ExtraRow(sequence=0, position=segment.start + int(row), exact=exact) for row in idle]
        return Boundary(extras=tuple(extras), pieces=tuple(pieces))

    def boundary_raw(self, layer: int, boundary: Boundary) -> list[torch.Tensor]:
        """Raw rows of `boundary` in `layer`, in its order, one tensor per raw projection."""
        widths = raw_widths(self._geometry, layer)
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA:
            return [torch.empty((0, width), dtype=self._dtype, device=self._device) for width in widths]
        parts = [torch.empty((0, sum(widths)), dtype=self._dtype, device=self._device)]
        parts += [self._source.take(read) for read in self._boundary_reads(layer, boundary)]
        return list(torch.cat(parts).split(widths, dim=1))

    def restoration(self, positions: NDArray[np.int64]) -> Restoration:
        """Where the cached rows of the tokens at these request positions are."""
        pieces = []
        for segment, reader in self._documents:
            inside = np.flatnonzero((positions >= segment.start) & (positions < segment.stop))
            if inside.size:
                rows = torch.from_numpy(positions[inside] - segment.start)
                pieces.append((reader, rows, torch.from_numpy(inside).to(self._device)))
        return Restoration(rows=len(positions), pieces=tuple(pieces))

    def restore_local(self, layer: int, restoration: Restoration) -> torch.Tensor:
        """Cached Local contributions of the rows, in their order: [rows, G * C of this rank]."""
        restored = torch.empty((restoration.rows, self._local_width), dtype=self._dtype, device=self._device)
        reads = self._local_reads(layer, restoration)
        for read, (_, _, places) in zip(reads, restoration.pieces, strict=True):
            restored[places] = self._source.take(read)
        return restored

    @staticmethod
    def _stream_reads(rows: Restoration) -> list[Read]:
        return [Read(reader=reader, part=Part.STREAMS, layer=None, index=index) for reader, index, _ in rows.pieces]

    def fill_streams(self, streams: torch.Tensor, restoration: Restoration) -> torch.Tensor:
        """Put the residual streams that the artifacts kept before the trailing fence into [rows, S, M]."""
        reads = self._stream_reads(restoration)
        for read, (_, _, places) in zip(reads, restoration.pieces, strict=True):
            streams[places] = self._source.take(read)
        return streams

    def salience(self, ratio: int) -> NDArray[np.float64]:
        """Salience the artifacts kept, for every entry of the request; entries of fresh segments have none (zero)."""
        values = []
        readers = {segment.index: reader for segment, reader in self._documents}
        for segment in self._segments:
            entries = segment.entries(ratio)
            reader = readers.get(segment.index)
            if reader is None:
                values.append(np.zeros(entries))
            else:
                values.append(reader.tensor(Part.SALIENCE, None, torch.float64).cpu().numpy())
        return np.concatenate(values)
