"""Reads of artifact tensors in the order a prefill makes them, and the source that makes each when it is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.formats import TensorCodec
from trt_redknot.observability.events import Tier


class ArtifactReader(Protocol):
    """One artifact, as a prefill sees it (a lease of the store implements it)."""

    @property
    def content_digest(self) -> str:
        """Of all its tensors: equal for the same bytes only."""
        ...

    def raw(self, part: Part, layer: int | None) -> torch.Tensor:
        """The tensor as stored, in host memory."""
        ...

    def codec(self, part: Part) -> TensorCodec: ...

    def count(self, tier: Tier, bytes: int) -> None:
        """Tell whoever counts of stored bytes taken from a tier; `tensor` and `rows` do so themselves."""
        ...

    def tensor(self, part: Part, layer: int | None, dtype: torch.dtype) -> torch.Tensor: ...

    def rows(self, part: Part, layer: int | None, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Rows of one artifact's tensors.

    Attributes:
        rows: how many.
        index: int64 [rows] in host memory, which they are; None: the whole tensor.
        device_index: the same on the device, for tensors that lie there.
    """

    reader: ArtifactReader
    rows: int
    index: torch.Tensor | None = None
    device_index: torch.Tensor | None = None

    def rows_of(self, stored: torch.Tensor) -> torch.Tensor:
        """The rows that are asked of a tensor, wherever it lies. Waits for nothing where `device_index` is given."""
        if self.index is None:
            return stored
        index = self.index if stored.device == self.index.device else self.device_index
        return stored.index_select(0, self.index.to(stored.device) if index is None else index)


# Identities, because a request may hold one document several times.
ReadKey = tuple[Part, int | None, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """One tensor of a layer from several artifacts, one after the other: a tile.

    Attributes:
        pieces: whole tensors, or rows of all. Equal reads, and those of layers that are cut alike, share the object.
    """

    part: Part
    layer: int | None
    pieces: tuple[Piece, ...]

    @property
    def key(self) -> ReadKey:
        """What tells the reads of a request apart."""
        return self.part, self.layer, id(self.pieces)


class TileSource(Protocol):
    """Where the tensors of a request's artifacts come from.

    `announce` says which reads the next layers make; every one of them is taken once, layers in order. A read that was
    not announced is made at once.
    """

    @property
    def moved(self) -> Mapping[Tier, int]:
        """Bytes taken so far, by where they were found."""
        ...

    def lateness(self) -> list[float]:
        """For every layer taken so far that was announced, seconds the computation waited for it. May wait for the
        device: ask after the last token."""
        ...

    def announce(self, layers: Sequence[Sequence[Read]]) -> None: ...

    def take(self, read: Read) -> list[torch.Tensor]:
        """The decoded rows on the device, in the order of the pieces, in as few tensors as they lie side by side there;
        valid until a read of a later layer is taken."""
        ...

    def close(self) -> None: ...


class DirectReads:
    """Makes every read when it is asked: right everywhere, and the caller waits for the disk and the copy."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._moved: Counter[Tier] = Counter()
        self._dtype = dtype
        self._device = device

    @property
    def moved(self) -> Mapping[Tier, int]:
        return self._moved

    def lateness(self) -> list[float]:
        return []

    def announce(self, layers: Sequence[Sequence[Read]]) -> None:
        return None

    def take(self, read: Read) -> list[torch.Tensor]:
        return [self._take(piece, read.part, read.layer) for piece in read.pieces]

    def _take(self, piece: Piece, part: Part, layer: int | None) -> torch.Tensor:
        reader = piece.reader
        if self._device.type == "cuda":
            stored = reader.raw(part, layer)
            if stored.device == self._device:
                return self._on_the_device(reader, part, piece.rows_of(stored))
        if piece.index is None:
            values = reader.tensor(part, layer, self._dtype)
        else:
            values = reader.rows(part, layer, piece.index, self._dtype)
        self._moved[Tier.HOST] += values.nbytes
        return values.to(self._device)

    def _on_the_device(self, reader: ArtifactReader, part: Part, stored: torch.Tensor) -> torch.Tensor:
        self._moved[Tier.DEVICE] += stored.nbytes
        reader.count(Tier.DEVICE, stored.nbytes)
        return reader.codec(part).decode(stored, self._dtype)

    def close(self) -> None:
        return None
