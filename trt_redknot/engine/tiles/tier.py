"""A tier: stored artifact tensors kept in memory nearer to the device than the store's files, least recently used first
out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.engine.tiles.reads import ArtifactReader

TierKey = tuple[str, Part, int | None]


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """Tensors found and not found since the tier was made, and the bytes it holds now."""

    hits: int
    misses: int
    bytes: int


class TileTier:
    """Holds whole tensors as they are stored, up to `capacity` bytes. Calls may come from any thread.

    Tensors are known by the digest of their artifact's certificate, which has the digests of all its files: what is
    held never goes stale, and never answers for another store, namespace or generation.

    Args:
        allocate: uint8 [n] of the tier's memory.
    """

    def __init__(self, capacity: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.capacity = capacity
        self._allocate = allocate
        self._held: OrderedDict[TierKey, torch.Tensor] = OrderedDict()
        self._guard = threading.Lock()
        self._bytes = self._hits = self._misses = 0

    @property
    def use(self) -> TierUse:
        with self._guard:
            return TierUse(hits=self._hits, misses=self._misses, bytes=self._bytes)

    def find(self, reader: ArtifactReader, part: Part, layer: int | None) -> torch.Tensor | None:
        """The stored tensor, if it is held. It stays valid for whoever has it, also after it was pushed out."""
        key = (reader.content_digest, part, layer)
        with self._guard:
            found = self._held.get(key)
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
                self._held.move_to_end(key)
            return found

    def keep(self, reader: ArtifactReader, part: Part, layer: int | None, stored: torch.Tensor) -> torch.Tensor:
        """Copy a stored tensor into the tier and return the copy; `stored` itself where it could never fit."""
        if stored.nbytes > self.capacity:
            return stored
        key = (reader.content_digest, part, layer)
        with self._guard:
            self._make_room(stored.nbytes)
        copy = self._allocate(stored.nbytes).view(stored.dtype).view(stored.shape)
        copy.copy_(stored)
        with self._guard:
            before = self._held.pop(key, None)
            self._bytes += copy.nbytes - (0 if before is None else before.nbytes)
            self._held[key] = copy
            self._make_room(0)
        return copy

    def _make_room(self, size: int) -> None:
        while self._held and self._bytes + size > self.capacity:
            _, dropped = self._held.popitem(last=False)
            self._bytes -= dropped.nbytes
