"""Collectives: local, MPI (and NCCL with the GPU runtime) behind one interface."""

from trt_redknot.collectives.base import Collectives
from trt_redknot.collectives.local import LocalCollectives


def from_communicator(comm: object | None) -> Collectives:
    """Collectives for an mpi4py communicator, or for a group of one when `comm` is None or has one rank."""
    if comm is None or comm.Get_size() == 1:  # type: ignore[attr-defined]
        return LocalCollectives()
    from trt_redknot.collectives.mpi import MpiCollectives

    return MpiCollectives(comm)  # type: ignore[arg-type]


__all__ = ["Collectives", "LocalCollectives", "from_communicator"]
