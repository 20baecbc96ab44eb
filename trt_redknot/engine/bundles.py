"""Pointer geometry of bundles of documents that come again: which rows the leading fence runs, where their latents and
keys lie, which entries they write.

It follows from the documents, their order and lengths, the policy and the places in the pool, and from nothing that a
request computes: which rows run after the leading fence depends on scores, and is worked out for every request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.pool import SequenceState
from trt_redknot.engine.rowset import RowSet
from trt_redknot.engine.step import StepArrays
from trt_redknot.engine.tables import RatioArrays
from trt_redknot.engine.uploads import ArrayBatch
from trt_redknot.request.controller import Candidates
from trt_redknot.request.segments import Segment

DEFAULT_BYTES = 256 * 2**20


class RowGeometry:
    """The tables of a row set on the device: made once, and those of a ratio when a layer first asks, so that the
    device is busy with the layers before it."""

    def __init__(self, arrays: StepArrays, device: torch.device) -> None:
        self.arrays = arrays
        self.base = ArrayBatch(arrays.base()).upload(device)
        self._device = device
        self._by_ratio: dict[int, tuple[RatioArrays, Sequence[torch.Tensor]]] = {}
        self._bytes = sum(array.nbytes for array in arrays.base())

    @property
    def nbytes(self) -> int:
        """On the device; the host holds about as much."""
        return self._bytes

    def of_ratio(self, ratio: int) -> tuple[RatioArrays, Sequence[torch.Tensor]]:
        found = self._by_ratio.get(ratio)
        if found is None:
            arrays = self.arrays.by_ratio[ratio]()
            found = self._by_ratio[ratio] = arrays, ArrayBatch(arrays.arrays()).upload(self._device)
            self._bytes += sum(array.nbytes for array in arrays.arrays())
        return found


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a request shares with others of its bundle. Nobody changes it.

    Attributes:
        flags: uint8 [N], :class:`Protection` known before anything runs.
        rows: of the leading fence.
        windows: candidates, before scores choose among them.
        geometry: of `rows`.
    """

    flags: NDArray[np.uint8]
    rows: RowSet
    windows: Candidates
    geometry: RowGeometry


@dataclass(frozen=True)
class BundleKey:
    """All that a bundle follows from, for one engine.

    Attributes:
        segments: documents by their artifacts, in order, with their lengths and edits; fresh ones by length.
        places: of the sequence in the pool: slot, first latent, first entries by ratio.
        chunk_rows, rank, size: how row sets are cut.
    """

    segments: tuple[Segment, ...]
    policy: ReusePolicy | None
    places: tuple[int, int, tuple[tuple[int, int], ...]]
    chunk_rows: int
    rank: int
    size: int

    @classmethod
    def of(
        cls, state: SequenceState, policy: ReusePolicy | None, *, chunk_rows: int, rank: int, size: int
    ) -> BundleKey:
        places = state.slot, state.latent_offset, tuple(sorted(state.entry_offsets.items()))
        return cls(tuple(state.segments), policy, places, chunk_rows, rank, size)


class BundleCache:
    """Bundles that came before, least recently used first out. For one thread.

    Args:
        capacity: bytes on the device that bundles of earlier requests may keep.

    Attributes:
        hits, misses: of `find`.
    """

    def __init__(self, capacity: int = DEFAULT_BYTES) -> None:
        self.capacity = capacity
        self.hits = self.misses = 0
        self._held: OrderedDict[BundleKey, Bundle] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Held now. A bundle grows while its first request runs; the next `find` counts that."""
        return sum(bundle.geometry.nbytes for bundle in self._held.values())

    def find(self, key: BundleKey, make: Callable[[], Bundle]) -> Bundle:
        """The bundle of this key, made where it did not come before or was dropped."""
        found = self._held.pop(key, None)
        if found is None:
            self.misses += 1
            found = make()
        else:
            self.hits += 1
        self._held[key] = found
        while self._held and self.nbytes > self.capacity:
            self._held.popitem(last=False)
        return found
