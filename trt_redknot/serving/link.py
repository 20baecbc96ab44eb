"""The control plane of a service: rank 0 tells, the others listen. Nobody keeps a core busy while there is nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# A rank that waits looks again after so many seconds, more and more rarely.
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.005


class Link(Protocol):
    """One message from rank 0 to all, and one from each of the others back, at a time. Collective."""

    rank: int
    size: int

    def lead(self, message: bytes) -> list[bytes]:
        """Rank 0: send, and take what the other ranks have to say, in rank order."""
        ...

    def follow(self, status: bytes) -> bytes:
        """Other ranks: wait for rank 0's message, however long, and send `status` with it."""
        ...

    def abort(self) -> None:
        """End the whole job, this process included, because a rank is lost."""
        ...


class LocalLink:
    """One rank: nobody listens."""

    rank = 0
    size = 1

    def lead(self, message: bytes) -> list[bytes]:
        return []

    def follow(self, status: bytes) -> bytes:
        raise ValueError("one rank has nobody to follow")

    def abort(self) -> None:
        """Nothing depends on this process but its own front end, which sees that the service is unhealthy."""


class MpiLink:
    """Over MPI, as bytes.

    Args:
        comm: an mpi4py communicator. It is duplicated, so messages of the engine and ours never meet.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def lead(self, message: bytes) -> list[bytes]:
        self._meet()
        self._comm.Bcast(np.array([len(message)], dtype=np.int64), root=0)
        self._comm.Bcast(np.frombuffer(message, dtype=np.uint8), root=0)
        sizes = np.zeros(self.size, dtype=np.int64)
        self._comm.Gather(np.zeros(1, dtype=np.int64), sizes, root=0)
        everything = np.empty(int(sizes.sum()), dtype=np.uint8)
        self._comm.Gatherv(np.empty(0, dtype=np.uint8), [everything, sizes.tolist()], root=0)
        stops = np.cumsum(sizes)
        return [everything[stop - size : stop].tobytes() for stop, size in zip(stops[1:], sizes[1:], strict=True)]

    def follow(self, status: bytes) -> bytes:
        self._meet()
        size = np.zeros(1, dtype=np.int64)
        self._comm.Bcast(size, root=0)
        message: NDArray[np.uint8] = np.empty(int(size[0]), dtype=np.uint8)
        self._comm.Bcast(message, root=0)
        self._comm.Gather(np.array([len(status)], dtype=np.int64), None, root=0)
        self._comm.Gatherv(np.frombuffer(status, dtype=np.uint8), None, root=0)
        return message.tobytes()

    def abort(self) -> None:
        self._comm.Abort(1)

    def _meet(self) -> None:
        """Wait for all ranks. Blocking calls of MPI would keep a core busy for as long as rank 0 has nothing to do."""
        met = self._comm.Ibarrier()
        pause = _FIRST_PAUSE_S
        while not met.Test():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def link_over(comm: Intracomm | None) -> Link:
    """For an mpi4py communicator, or for one rank when `comm` is None or has one rank."""
    return LocalLink() if comm is None or comm.Get_size() == 1 else MpiLink(comm)
