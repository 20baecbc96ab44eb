"""The documents of an admitted request, as the prefill sees them: what is loaded, what is restored, what is pooled
again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.executor import StageExecutor
from trt_redknot.engine.placement import Boundary, Restoration, Whole, place_of, side_by_side
from trt_redknot.engine.pool import CachePool, SequenceState, raw_widths
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.tables import ExtraRow
from trt_redknot.engine.tiles import ArtifactReader, DirectReads, Piece, Read, TileSource
from trt_redknot.engine.uploads import ArrayBatch, upload
from trt_redknot.observability.events import Tier
from trt_redknot.request.segments import Segment, SegmentKind


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
        self._wholes: dict[tuple[AttentionKind, bool], tuple[Whole, ...]] = {}
        self._frames: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}

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
                *([restoration.read(Part.LOCAL, layer)] if restoration.pieces else ()),
            ]
            for layer in layers
        ]
        streams = [] if then is None or not then.pieces else [[then.read(Part.STREAMS, None)]]
        self._source.announce([*reads, *streams])

    def _wholes_of(self, layer: int, *, only_prefix: bool) -> tuple[Whole, ...]:
        """What `load_layer` reads, in its order: alike in all layers of a kind."""
        kind = self._geometry.attention_kinds[layer]
        found = self._wholes.get((kind, only_prefix))
        if found is None:
            parts = {
                AttentionKind.SLIDING: (Part.LATENTS,),
                AttentionKind.HCA: (Part.LATENTS, Part.ENTRIES),
                AttentionKind.CSA: (Part.LATENTS, Part.ENTRIES, Part.INDEX_KEYS),
            }[kind]
            ratio = self._geometry.ratio(layer)
            documents = [
                (segment, reader)
                for segment, reader in self._documents
                if not only_prefix or segment.kind is SegmentKind.PREFIX
            ]
            wholes = [self._whole(part, ratio, documents) for part in parts] if documents else []
            found = self._wholes[kind, only_prefix] = tuple(wholes)
        return found

    def _whole(self, part: Part, ratio: int, documents: Sequence[tuple[Segment, ArtifactReader]]) -> Whole:
        pieces = []
        spans: list[tuple[int, int]] = []
        begins: list[tuple[tuple[int, int], ...]] = []
        for segment, reader in documents:
            if part is Part.LATENTS:
                first, count = segment.start, segment.length
            else:
                first = sum(each.entries(ratio) for each in self._segments[: segment.index])
                count = segment.entries(ratio)
            pieces.append(Piece(reader=reader, rows=count))
            if not spans or sum(spans[-1]) != first:
                spans.append((first, 0))
                begins.append(())
            spans[-1] = (spans[-1][0], spans[-1][1] + count)
            begins[-1] = (*begins[-1], (segment.start, count))
        targets = tuple(slice(first, first + count) for first, count in spans)
        return Whole(
            part=part, pieces=tuple(pieces), targets=targets, frames=tuple(self._frames_of(each) for each in begins)
        )

    def _frames_of(self, begins: tuple[tuple[int, int], ...]) -> torch.Tensor | None:
        """Where the document of each row begins, of positions and numbers of rows. Made once for all layers that keep
        as many; None where nothing is to be turned."""
        if not any(start for start, _ in begins):
            return None
        found = self._frames.get(begins)
        if found is None:
            starts, counts = np.array(begins, dtype=np.int64).T
            found = self._frames[begins] = upload(np.repeat(starts, counts), self._device)
        return found

    def _whole_reads(self, layer: int, *, only_prefix: bool) -> list[Read]:
        return [
            Read(part=whole.part, layer=layer, pieces=whole.pieces)
            for whole in self._wholes_of(layer, only_prefix=only_prefix)
        ]

    def _boundary_reads(self, layer: int, boundary: Boundary) -> list[Read]:
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA or not boundary.pieces:
            return []
        return [Read(part=Part.BOUNDARY, layer=layer, pieces=boundary.pieces)]

    def load_layer(
        self, layer: int, pool: CachePool, state: SequenceState, stages: StageExecutor, *, only_prefix: bool
    ) -> None:
        """Put the cached latents, entries and Indexer keys of the documents into the pool, turned from their documents'
        frames to the request's; rows that run replace theirs."""
        wholes = self._wholes_of(layer, only_prefix=only_prefix)
        if not wholes:
            return
        # From the sequence's first row on.
        tables = {Part.LATENTS: pool.latents[layer][state.latent_offset :]}
        for part, table in ((Part.ENTRIES, pool.entries[layer]), (Part.INDEX_KEYS, pool.index_keys[layer])):
            if table is not None:
                tables[part] = table[state.entry_offsets[self._geometry.ratio(layer)] :]
        targets, values = [], []
        for whole in wholes:
            taken = self._source.take(Read(part=whole.part, layer=layer, pieces=whole.pieces))
            for rows, tensor in side_by_side(whole.targets, taken):
                targets.append(tables[whole.part][rows])
                values.append(pool.rows.stored(whole.part, tensor))
        # One launch: every kind of row, and where they are read one by one every document, is a tensor.
        torch._foreach_copy_(targets, values)
        # In the pool, because what was taken may be the artifact itself.
        for whole in wholes:
            for rows, frames in zip(whole.targets, whole.frames, strict=True):
                if frames is not None:
                    self._turn(layer, whole.part, tables[whole.part][rows], frames, pool, stages)

    def _turn(
        self,
        layer: int,
        part: Part,
        stored: torch.Tensor,
        frames: torch.Tensor,
        pool: CachePool,
        stages: StageExecutor,
    ) -> None:
        """Rows of the pool, in place."""
        numbers = pool.rows.values(part, stored)
        stages.turn(self._geometry.attention_kinds[layer], numbers, frames)
        if pool.rows.packed:
            stored.copy_(pool.rows.stored(part, numbers))

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
            Piece(reader=reader, rows=len(kept), index=torch.from_numpy(kept), device_index=device_rows)
            for (reader, kept), device_rows in zip(found, there, strict=True)
        ]
        return Boundary(extras=tuple(extras), pieces=tuple(pieces))

    def boundary_raw(self, layer: int, boundary: Boundary) -> list[torch.Tensor]:
        """Raw rows of `boundary` in `layer`, in its order, one tensor per raw projection."""
        widths = raw_widths(self._geometry, layer)
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA:
            return [torch.empty((0, width), dtype=self._dtype, device=self._device) for width in widths]
        parts = [torch.empty((0, sum(widths)), dtype=self._dtype, device=self._device)]
        parts += [rows for read in self._boundary_reads(layer, boundary) for rows in self._source.take(read)]
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
        targets = [target for _, _, target in found]
        whole = np.concatenate([np.empty(0, dtype=np.int64), *targets])
        arrays = [*(rows for _, rows, _ in found), *targets, whole]
        there = ArrayBatch(arrays).upload(self._device)
        pieces = [
            Piece(reader=reader, rows=len(rows), index=torch.from_numpy(rows), device_index=device_rows)
            for (reader, rows, _), device_rows in zip(found, there[: len(found)], strict=True)
        ]
        put = [place_of(*each) for each in zip([*targets, whole], there[len(found) :], strict=True)]
        return Restoration(rows=len(positions), pieces=tuple(pieces), places=tuple(put[:-1]), place=put[-1])

    def restore_local(self, layer: int, restoration: Restoration) -> torch.Tensor:
        """Cached Local contributions of the rows, in their order: [rows, G * C of this rank]. Valid until rows of a
        later layer are restored."""
        taken = self._source.take(restoration.read(Part.LOCAL, layer)) if restoration.pieces else []
        if len(taken) == 1 and restoration.place == slice(0, restoration.rows):
            return taken[0]
        restored = torch.empty((restoration.rows, self._local_width), dtype=self._dtype, device=self._device)
        restoration.put(restored, taken)
        return restored

    def fill_streams(self, streams: torch.Tensor, restoration: Restoration) -> None:
        """Put the residual streams that the artifacts kept before the trailing fence into their places of
        [rows, S, M]."""
        if restoration.pieces:
            restoration.put(streams, self._source.take(restoration.read(Part.STREAMS, None)))

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
