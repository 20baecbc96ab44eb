"""Numbers that the host works out and the device needs, and the other way round, without a wait that nobody asked for.

Copies to a GPU leave from pinned memory, in the order of the current stream, and the host goes on at once. One copy
carries many small arrays: a copy costs the host more than its bytes cost the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Arrays of a batch begin at multiples of so many elements (128 bytes), which is what any kernel asks of an address.
_ALIGNMENT = 16


class ArrayBatch:
    """int64 arrays that travel as one copy; an array that comes several times travels once.

    Args:
        arrays: any shapes, also empty ones.
    """

    def __init__(self, arrays: Sequence[NDArray[np.int64]]) -> None:
        self._arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]
        placed: dict[int, int] = {}
        self._size = 0
        for array in self._arrays:
            if id(array) not in placed:
                placed[id(array)] = self._size
                self._size += -(-array.size // _ALIGNMENT) * _ALIGNMENT
        self._offsets = [placed[id(array)] for array in self._arrays]

    @property
    def layout(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Place and shape of every array: batches of equal layouts can stand for each other."""
        return tuple(zip(self._offsets, (array.shape for array in self._arrays), strict=True))

    @property
    def size(self) -> int:
        """Elements of the copy."""
        return self._size

    def packed(self, device: torch.device) -> torch.Tensor:
        """int64 [size] in host memory, pinned where `device` is a GPU."""
        flat = torch.empty(self.size, dtype=torch.int64, pin_memory=device.type == "cuda")
        target = flat.numpy()
        placed = zip(self._offsets, self._arrays, strict=True)
        # One without elements begins where the next one does.
        for offset, array in {offset: array for offset, array in placed if array.size}.items():
            target[offset : offset + array.size] = array.reshape(-1)
        return flat

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The arrays in a tensor with this batch's layout, in order, sharing its memory."""
        return [
            flat[offset : offset + array.size].view(array.shape)
            for array, offset in zip(self._arrays, self._offsets, strict=True)
        ]

    def upload(self, device: torch.device) -> list[torch.Tensor]:
        """The arrays on the device, in order."""
        return self.views(self.packed(device).to(device, non_blocking=True))


def upload(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """One int64 array on the device."""
    return ArrayBatch([array]).upload(device)[0]


class Arriving:
    """Numbers on their way to the host, in the order of the current stream."""

    def __init__(self, values: torch.Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(values.device))

    def wait(self) -> NDArray[Any]:
        """The numbers, in their own dtype. Waits for the device where they are not there yet."""
        if self._there is not None:
            self._there.synchronize()
        arrived: NDArray[Any] = self._host.numpy()
        return arrived
