"""The documents of an admitted request, as the prefill sees them: what is loaded, what is restored, what is pooled
again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.pool import CachePool, SequenceState, raw_widths
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.tables import ExtraRow
from trt_redknot.request.segments import Segment, SegmentKind


class ArtifactReader(Protocol):
    """What the prefill reads of one artifact (a lease of the store implements it)."""

    def tensor(self, part: Part, layer: int | None, *, dtype: torch.dtype) -> torch.Tensor: ...

    def rows(self, part: Part, layer: int | None, index: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Raw rows from artifacts that a row set may pool. Found once a row set, used in every layer."""

    extras: tuple[ExtraRow, ...]
    pieces: tuple[tuple[ArtifactReader, torch.Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """Cached rows to fetch and the places they go to, by artifact. Found once a chunk, used in every layer."""

    rows: int
    pieces: tuple[tuple[ArtifactReader, torch.Tensor, torch.Tensor], ...]


class Documents:
    """Artifacts of one sequence, by segment.

    Args:
        readers: by index of the document's segment; empty in the recompute arm.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        segments: Sequence[Segment],
        readers: dict[int, ArtifactReader],
        *,
        local_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._geometry = geometry
        self._segments = tuple(segments)
        self._documents = [(segment, readers[segment.index]) for segment in segments if segment.index in readers]
        self._local_width = local_width
        self._dtype = dtype
        self._device = device
        self.loaded_bytes = 0

    def _read(self, reader: ArtifactReader, part: Part, layer: int | None) -> torch.Tensor:
        values = reader.tensor(part, layer, dtype=self._dtype).to(self._device)
        self.loaded_bytes += values.numel() * values.element_size()
        return values

    def _read_rows(self, reader: ArtifactReader, part: Part, layer: int | None, rows: torch.Tensor) -> torch.Tensor:
        values = reader.rows(part, layer, rows, dtype=self._dtype).to(self._device)
        self.loaded_bytes += values.numel() * values.element_size()
        return values

    def load_layer(self, layer: int, pool: CachePool, state: SequenceState, *, only_prefix: bool) -> None:
        """Put the cached latents, entries and Indexer keys of the documents into the pool; rows that run replace
        theirs."""
        kind = self._geometry.attention_kinds[layer]
        ratio = self._geometry.ratio(layer)
        for segment, reader in self._documents:
            if only_prefix and segment.kind is not SegmentKind.PREFIX:
                continue
            start = state.latent_offset + segment.start
            pool.latents[layer][start : start + segment.length] = self._read(reader, Part.LATENTS, layer)
            if kind is AttentionKind.SLIDING:
                continue
            first = state.entry_offsets[ratio] + sum(s.entries(ratio) for s in state.segments[: segment.index])
            rows = slice(first, first + segment.entries(ratio))
            for target, part in ((pool.entries[layer], Part.ENTRIES), (pool.index_keys[layer], Part.INDEX_KEYS)):
                if target is not None:
                    target[rows] = self._read(reader, part, layer)

    def boundary(self, rows: RowSet) -> Boundary:
        """Last rows of documents that do not run with `rows`; their raw projections are in the artifact."""
        pieces, extras = [], []
        for segment, reader in self._documents:
            last = np.arange(max(0, segment.length - self._geometry.csa_ratio), segment.length)
            idle = last[~np.isin(segment.start + last, rows.positions)]
            if idle.size:
                pieces.append((reader, torch.from_numpy(idle - last[0]).to(self._device)))
                exact = segment.kind is SegmentKind.PREFIX
                extras += [ExtraRow(sequence=0, position=segment.start + int(row), exact=exact) for row in idle]
        return Boundary(extras=tuple(extras), pieces=tuple(pieces))

    def boundary_raw(self, layer: int, boundary: Boundary) -> list[torch.Tensor]:
        """Raw rows of `boundary` in `layer`, in its order, one tensor per raw projection."""
        widths = raw_widths(self._geometry, layer)
        if self._geometry.attention_kinds[layer] is not AttentionKind.CSA:
            return [torch.empty((0, width), dtype=self._dtype, device=self._device) for width in widths]
        parts = [torch.empty((0, sum(widths)), dtype=self._dtype, device=self._device)]
        parts += [self._read_rows(reader, Part.BOUNDARY, layer, index) for reader, index in boundary.pieces]
        return list(torch.cat(parts).split(widths, dim=1))

    def restoration(self, positions: NDArray[np.int64]) -> Restoration:
        """Where the cached Local contributions of rows at these request positions are."""
        pieces = []
        for segment, reader in self._documents:
            inside = np.flatnonzero((positions >= segment.start) & (positions < segment.stop))
            if inside.size:
                rows = torch.from_numpy(positions[inside] - segment.start).to(self._device)
                pieces.append((reader, rows, torch.from_numpy(inside).to(self._device)))
        return Restoration(rows=len(positions), pieces=tuple(pieces))

    def restore_local(self, layer: int, restoration: Restoration) -> torch.Tensor:
        """Cached Local contributions of the rows, in their order: [rows, G * C of this rank]."""
        restored = torch.empty((restoration.rows, self._local_width), dtype=self._dtype, device=self._device)
        for reader, rows, places in restoration.pieces:
            restored[places] = self._read_rows(reader, Part.LOCAL, layer, rows)
        return restored

    def fill_streams(self, streams: torch.Tensor, positions: NDArray[np.int64]) -> torch.Tensor:
        """Residual streams that the artifacts kept before the trailing fence, for rows at these positions."""
        for segment, reader in self._documents:
            inside = np.flatnonzero((positions >= segment.start) & (positions < segment.stop))
            if inside.size:
                rows = torch.from_numpy(positions[inside] - segment.start)
                streams[torch.from_numpy(inside).to(streams.device)] = self._read_rows(reader, Part.STREAMS, None, rows)
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
                values.append(reader.tensor(Part.SALIENCE, None, dtype=torch.float64).cpu().numpy())
        return np.concatenate(values)
