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


# Identities, because a request may hold one document several times.
ReadKey = tuple[int, Part, int | None, int | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """A tensor of an artifact, or rows of it.

    Attributes:
        index: int64 [k] in host memory; None: the whole tensor. Equal reads share the same object.
        device_index: the same on the device, for tensors that lie there.
    """

    reader: ArtifactReader
    part: Part
    layer: int | None
    index: torch.Tensor | None = None
    device_index: torch.Tensor | None = None

    def rows_of(self, stored: torch.Tensor) -> torch.Tensor:
        """The rows that are asked of a tensor, wherever it lies. Waits for nothing where `device_index` is given."""
        if self.index is None:
            return stored
        index = self.index if stored.device == self.index.device else self.device_index
        return stored.index_select(0, self.index.to(stored.device) if index is None else index)

    @property
    def key(self) -> ReadKey:
        """What tells the reads of a request apart."""
        return id(self.reader), self.part, self.layer, None if self.index is None else id(self.index)


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

    def take(self, read: Read) -> torch.Tensor:
        """The decoded tensor on the device, valid until a read of a later layer is taken."""
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

    def take(self, read: Read) -> torch.Tensor:
        if self._device.type == "cuda":
            stored = read.reader.raw(read.part, read.layer)
            if stored.device == self._device:
                return self._on_the_device(read, read.rows_of(stored))
        if read.index is None:
            values = read.reader.tensor(read.part, read.layer, self._dtype)
        else:
            values = read.reader.rows(read.part, read.layer, read.index, self._dtype)
        self._moved[Tier.HOST] += values.nbytes
        return values.to(self._device)

    def _on_the_device(self, read: Read, stored: torch.Tensor) -> torch.Tensor:
        self._moved[Tier.DEVICE] += stored.nbytes
        read.reader.count(Tier.DEVICE, stored.nbytes)
        return read.reader.codec(read.part).decode(stored, self._dtype)

    def close(self) -> None:
        return None
