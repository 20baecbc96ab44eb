"""Collectives over MPI with host buffers: the CPU backend's data plane and every backend's control plane.

Tensors of a GPU are staged through host memory: right, and slow. A GPU data plane replaces it where speed matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# MPI has no 16-bit floats: sums of those travel as float32.
_CARRIER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def _bytes(rows: torch.Tensor) -> np.ndarray:
    """A tensor's memory as bytes. Moving rows does no arithmetic, so every dtype travels exactly."""
    return rows.cpu().contiguous().view(-1).view(torch.uint8).numpy()


def exchange_bytes(comm: Intracomm, payload: bytes) -> list[bytes]:
    """Every rank's payload, in rank order. As bytes: mpi4py's own allgather would unpickle what it receives."""
    sizes = np.empty(comm.Get_size(), dtype=np.int64)
    comm.Allgather(np.array([len(payload)], dtype=np.int64), sizes)
    everything = np.empty(int(sizes.sum()), dtype=np.uint8)
    comm.Allgatherv(np.frombuffer(payload, dtype=np.uint8), [everything, sizes.tolist()])
    return [part.tobytes() for part in np.split(everything, np.cumsum(sizes)[:-1])]


class MpiCollectives:
    """Blocking MPI collectives on CPU tensors.

    Args:
        comm: an mpi4py communicator. It is duplicated, so messages of the caller and ours never meet.
    """

    # Tensors of a GPU pass through the host.
    capturable = False

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert own.shape[0] == counts[self.rank], f"{own.shape[0]} rows against counts {list(counts)}"
        gathered = torch.empty((sum(counts), *own.shape[1:]), dtype=own.dtype)
        width = _row_bytes(own)
        self._comm.Allgatherv(_bytes(own), [_bytes(gathered), [count * width for count in counts]])
        return gathered.to(own.device)

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert partial.shape[0] == sum(counts), f"{partial.shape[0]} rows against counts {list(counts)}"
        row = partial.shape[1:]
        carrier = _CARRIER.get(partial.dtype, partial.dtype)
        own = torch.empty((counts[self.rank], *row), dtype=carrier)
        width = row.numel()
        self._comm.Reduce_scatter(
            partial.to(device="cpu", dtype=carrier).contiguous().numpy(),
            own.numpy(),
            [count * width for count in counts],
        )
        return own.to(device=partial.device, dtype=partial.dtype)

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        carrier = _CARRIER.get(partial.dtype, partial.dtype)
        total = torch.empty(partial.shape, dtype=carrier)
        self._comm.Allreduce(partial.to(device="cpu", dtype=carrier).contiguous().numpy(), total.numpy())
        return total.to(device=partial.device, dtype=partial.dtype)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        assert rows.shape[0] == sum(send_counts), f"{rows.shape[0]} rows against counts {list(send_counts)}"
        received = torch.empty((sum(receive_counts), *rows.shape[1:]), dtype=rows.dtype)
        width = _row_bytes(rows)
        self._comm.Alltoallv(
            [_bytes(rows), [count * width for count in send_counts]],
            [_bytes(received), [count * width for count in receive_counts]],
        )
        return received.to(rows.device)

    def exchange(self, payload: bytes) -> list[bytes]:
        return exchange_bytes(self._comm, payload)

    def barrier(self) -> None:
        self._comm.Barrier()
