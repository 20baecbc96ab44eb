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
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.observability.events import Tier
from trt_redknot.ops.cuda.rows import write_rows
from trt_redknot.request.segments import Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Raw rows from artifacts that a row set may pool. Found once a row set, used in every layer.

    Attributes:
        pieces: by artifact, rows of its boundary tensor: int64 [k], on the host and on the device.
    """

    extras: tuple[ExtraRow, ...]
    pieces: tuple[tuple[ArtifactReader, torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Cached rows to fetch and the places they go to, by artifact. Found once a row set, used in every layer."""

    rows: int
    pieces: tuple[RestoredPiece, ...]


@dataclass(frozen=True, kw_only=True)
class RestoredPiece:
    """Rows of one artifact.

    Attributes:
        rows, device_rows: int64 [k], rows of its tensors, on the host and on the device.
        places: where they go: int64 [k] on the device, or a slice where they go side by side.
    """

    reader: ArtifactReader
    rows: torch.Tensor
    device_rows: torch.Tensor
    places: torch.Tensor | slice

    def read(self, part: Part, layer: int | None) -> Read:
        return Read(reader=self.reader, part=part, layer=layer, index=self.rows, device_index=self.device_rows)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Rows of a table of the pool that a document's tensor goes to."""

    reader: ArtifactReader
    part: Part
    rows: slice


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
        self._places: dict[tuple[AttentionKind, bool], tuple[_Place, ...]] = {}

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
        restoration: Restoration,
        then: Restoration | None = None,
    ) -> None:
        """Say what the next layers will read, so that it can be on its way before they ask.

        Args:
            idle: some rows of the request do not run, so that layers are loaded.
            then: rows whose streams are filled after these layers.
        """
        reads = [
            [
                *(self._whole_reads(layer, only_prefix=only_prefix) if idle else ()),
                *self._boundary_reads(layer, boundary),
                *(piece.read(Part.LOCAL, layer) for piece in restoration.pieces),
            ]
            for layer in layers
        ]
        streams = [] if then is None else [[piece.read(Part.STREAMS, None) for piece in then.pieces]]
        self._source.announce([*reads, *streams])

    def _whole_parts(self, layer: int, *, only_prefix: bool) -> Iterator[tuple[Segment, ArtifactReader, Part]]:
        """What `load_layer` reads, in its order."""
        parts = {
            AttentionKind.SLIDING: (Part.LATENTS,),
            AttentionKind.HCA: (Part.LATENTS, Part.ENTRIES),
            AttentionKind.CSA: (Part.LATENTS, Part.ENTRIES, Part.INDEX_KEYS),
        }[self._geometry.attention_kinds[layer]]
        for segment, reader in self._documents:
            if not only_prefix or segment.kind is SegmentKind.PREFIX:
                yield from ((segment, reader, part) for part in parts)

    def _whole_reads(self, layer: int, *, only_prefix: bool) -> Iterator[Read]:
        for _, reader, part in self._whole_parts(layer, only_prefix=only_prefix):
            yield Read(reader=reader, part=part, layer=layer)

    def _boundary_reads(self, layer: int, boundary: Boundary) -> list[Read]:
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA:
            return []
        return [
            Read(reader=reader, part=Part.BOUNDARY, layer=layer, index=rows, device_index=device_rows)
            for reader, rows, device_rows in boundary.pieces
        ]

    def load_layer(self, layer: int, pool: CachePool, state: SequenceState, *, only_prefix: bool) -> None:
        """Put the cached latents, entries and Indexer keys of the documents into the pool; rows that run replace
        theirs."""
        kind = self._geometry.attention_kinds[layer]
        if (kind, only_prefix) not in self._places:
            self._places[kind, only_prefix] = tuple(self._whole_places(layer, state, only_prefix=only_prefix))
        tables = {
            Part.LATENTS: pool.latents[layer],
            Part.ENTRIES: pool.entries[layer],
            Part.INDEX_KEYS: pool.index_keys[layer],
        }
        targets, values = [], []
        for place in self._places[kind, only_prefix]:
            table = tables[place.part]
            assert table is not None
            taken = self._source.take(Read(reader=place.reader, part=place.part, layer=layer))
            targets.append(table[place.rows])
            values.append(pool.rows.stored(place.part, taken))
        if targets:
            # One launch: there are many documents, and every one has three tensors in a layer.
            torch._foreach_copy_(targets, values)

    def _whole_places(self, layer: int, state: SequenceState, *, only_prefix: bool) -> Iterator[_Place]:
        ratio = self._geometry.ratio(layer)
        for segment, reader, part in self._whole_parts(layer, only_prefix=only_prefix):
            if part is Part.LATENTS:
                first, count = state.latent_offset + segment.start, segment.length
            else:
                before = sum(each.entries(ratio) for each in state.segments[: segment.index])
                first, count = state.entry_offsets[ratio] + before, segment.entries(ratio)
            yield _Place(reader=reader, part=part, rows=slice(first, first + count))

    def boundary(self, rows: RowSet) -> Boundary:
        """Last rows of documents that do not run with `rows`; their raw projections are in the artifact."""
        runs = np.zeros(self._segments[-1].stop, dtype=bool)
        runs[rows.positions] = True
        found: list[tuple[ArtifactReader, NDArray[np.int64]]] = []
        extras = []
        for segment, reader in self._documents:
            last = np.arange(max(0, segment.length - self._geometry.csa_ratio), segment.length)
            idle = last[~runs[segment.start + last]]
            if idle.size:
                found.append((reader, idle - last[0]))
                exact = segment.kind is SegmentKind.PREFIX
                extras += [ExtraRow(sequence=0, position=segment.start + int(row), exact=exact) for row in idle]
        there = ArrayBatch([kept for _, kept in found]).upload(self._device)
        pieces = [
            (reader, torch.from_numpy(kept), device_rows)
            for (reader, kept), device_rows in zip(found, there, strict=True)
        ]
        return Boundary(extras=tuple(extras), pieces=tuple(pieces))

    def boundary_raw(self, layer: int, boundary: Boundary) -> list[torch.Tensor]:
        """Raw rows of `boundary` in `layer`, in its order, one tensor per raw projection."""
        widths = raw_widths(self._geometry, layer)
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA:
            return [torch.empty((0, width), dtype=self._dtype, device=self._device) for width in widths]
        parts = [torch.empty((0, sum(widths)), dtype=self._dtype, device=self._device)]
        parts += [self._source.take(read) for read in self._boundary_reads(layer, boundary)]
        # Few rows, which then join many: whole rows join at the speed of a copy, columns of a wider tensor do not.
        return [columns.contiguous() for columns in torch.cat(parts).split(widths, dim=1)]

    def restoration(self, positions: NDArray[np.int64], places: NDArray[np.int64] | None = None) -> Restoration:
        """Where the cached rows of the tokens at these request positions are.

        Args:
            places: int64, where each of them goes; left out: in their order.
        """
        found = []
        for segment, reader in self._documents:
            inside = np.flatnonzero((positions >= segment.start) & (positions < segment.stop))
            if inside.size:
                found.append((reader, positions[inside] - segment.start, inside if places is None else places[inside]))
        arrays = [array for _, rows, target in found for array in (rows, target)]
        there = iter(ArrayBatch(arrays).upload(self._device))
        pieces = []
        for reader, rows, target in found:
            device_rows, scattered = next(there), next(there)
            first, last = int(target[0]), int(target[-1])
            side_by_side = last - first + 1 == len(target) and bool((np.diff(target) == 1).all())
            pieces.append(
                RestoredPiece(
                    reader=reader, rows=torch.from_numpy(rows), device_rows=device_rows,
                    places=slice(first, last + 1) if side_by_side else scattered,
                )
            )  # fmt: skip
        return Restoration(rows=len(positions), pieces=tuple(pieces))

    def restore_local(self, layer: int, restoration: Restoration) -> torch.Tensor:
        """Cached Local contributions of the rows, in their order: [rows, G * C of this rank]."""
        restored = torch.empty((restoration.rows, self._local_width), dtype=self._dtype, device=self._device)
        for piece in restoration.pieces:
            _put(restored, piece.places, self._source.take(piece.read(Part.LOCAL, layer)))
        return restored

    def fill_streams(self, streams: torch.Tensor, restoration: Restoration) -> None:
        """Put the residual streams that the artifacts kept before the trailing fence into their places of
        [rows, S, M]."""
        for piece in restoration.pieces:
            _put(streams, piece.places, self._source.take(piece.read(Part.STREAMS, None)))

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


def _put(target: torch.Tensor, places: torch.Tensor | slice, values: torch.Tensor) -> None:
    if isinstance(places, slice):
        target[places].copy_(values)
    else:
        write_rows(target, places, values)
