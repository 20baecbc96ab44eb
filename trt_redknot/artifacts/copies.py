"""Tensors on their way to host memory: from a GPU into pinned memory, on a stream of their own, so that the next layers
compute meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """A copy that was begun.

    Attributes:
        there: when the copy is done; None: it is.
    """

    _tensor: torch.Tensor
    there: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def wait(self) -> torch.Tensor:
        """The tensor in host memory. Waits until it is there."""
        if self.there is not None:
            self.there.synchronize()
        return self._tensor


class HostCopies:
    """Begins copies. Pinned memory is torch's: it keeps what was given back for the next copies of such sizes, so that
    only the first ones pay for pages."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, tensor: torch.Tensor) -> HostCopy:
        """Copy a contiguous tensor that nobody writes any more. One in host memory is its own copy."""
        if tensor.device.type != "cuda":
            return HostCopy(_tensor=tensor)
        device = tensor.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        there = torch.cuda.Event()
        # Pinning opens a context on the calling thread's device, which need not be this one.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            there.record(stream)
        tensor.record_stream(stream)
        return HostCopy(_tensor=host, there=there)
