"""Collectives on device memory over a torch.distributed group: NCCL between GPUs, Gloo where a test has none.

Control messages stay with the ranks' own control plane (MPI). Nothing here waits for a device: results are ordered on
the stream that was current at the call.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import socket
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from trt_redknot.collectives.agreement import agree
from trt_redknot.collectives.base import Collectives
from trt_redknot.errors import CollectiveError

# How long a rank waits for another one before the job is ended: longer than any honest step, shorter than patience.
TIMEOUT = timedelta(minutes=10)

# torch 2.13 renamed these two; older releases have the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class DeviceCollectives:
    """Implements :class:`trt_redknot.collectives.Collectives`: tensors over a group, control over `control`.

    Rows may be uneven: where they are, blocks are padded to the largest, which costs at most one row a rank for the
    even splits the engine makes. Sums of 16-bit floats are rounded at every step of the transport, as NCCL does.

    Args:
        control: exchanges bytes between the same ranks.
        group: a torch.distributed group of these ranks in the same order; destroyed with this object.
    """

    # NCCL's kernels could be; the group's watchdog has not been tried beside a capture.
    capturable = False

    def __init__(self, control: Collectives, group: dist.ProcessGroup) -> None:
        self.rank = control.rank
        self.size = control.size
        self._control = control
        self._group = group
        weakref.finalize(self, _end, group)

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert own.shape[0] == counts[self.rank], f"{own.shape[0]} rows against counts {list(counts)}"
        most = max(counts)
        gathered = own.new_empty((self.size * most, *own.shape[1:]))
        if gathered.numel():
            _all_gather(_bytes(gathered), _bytes(_padded(own, most)), group=self._group)
        return gathered if min(counts) == most else _without_padding(gathered, counts)

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        assert partial.shape[0] == sum(counts), f"{partial.shape[0]} rows against counts {list(counts)}"
        most = max(counts)
        if min(counts) < most:
            partial = _with_padding(partial.contiguous(), counts)
        own = partial.new_empty((most, *partial.shape[1:]))
        if own.numel():
            _reduce_scatter(own, partial.contiguous(), group=self._group)
        return own[: counts[self.rank]]

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        if total.numel():
            dist.all_reduce(total, group=self._group)
        return total

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        assert rows.shape[0] == sum(send_counts), f"{rows.shape[0]} rows against counts {list(send_counts)}"
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        width = rows.shape[1:].numel() * rows.element_size()
        dist.all_to_all_single(
            _bytes(received),
            _bytes(rows),
            [count * width for count in receive_counts],
            [count * width for count in send_counts],
            group=self._group,
        )
        return received

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._control.exchange(payload)

    def barrier(self) -> None:
        self._control.barrier()


def connect(control: Collectives, device: torch.device) -> Collectives:
    """The data plane of ranks that compute on `device`. Collective.

    GPUs of their own speak NCCL. Ranks that share one stay with `control`, which stages tensors through host memory:
    NCCL refuses a GPU that it sees twice.

    Raises:
        CollectiveError: torch has no NCCL, or the application's own torch.distributed group has other ranks; on all
            ranks.
    """
    if control.size == 1 or device.type == "cpu":
        return control
    name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    failure = None if dist.is_nccl_available() else CollectiveError("torch was built without NCCL")
    if len(set(map(str, agree(control, name, failure)))) < control.size:
        return control
    return DeviceCollectives(control, make_group(control, "nccl"))


def make_group(control: Collectives, backend: str) -> dist.ProcessGroup:
    """A torch.distributed group of these ranks in their order. Collective.

    Args:
        backend: as torch.distributed names it.

    Raises:
        CollectiveError: the application has a default group already, and it has other ranks; on all ranks.
    """
    failure = None
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (control.rank, control.size):
        failure = CollectiveError(
            "torch.distributed's default group in this process has other ranks than the engine",
            expected=f"rank {control.rank} of {control.size}",
            found=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            remedy="Open the engine with a communicator of the same ranks in the same order; the group may be the "
            "application's, or of an engine that was opened before.",
        )
    agree(control, None, failure)
    if not dist.is_initialized():
        dist.init_process_group(
            backend, store=_store(control), rank=control.rank, world_size=control.size, timeout=TIMEOUT
        )
        # Nobody else will: it is not the application's.
        atexit.register(_end, dist.group.WORLD)
    group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=TIMEOUT)
    return group


def _end(group: dist.ProcessGroup | None) -> None:
    """Destroy a group that is still there: with the default group all others go."""
    if dist.is_initialized():
        # That of a default group which the application has destroyed and made again.
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def _store(control: Collectives) -> TCPStore:
    """Where the ranks of a group find each other: rank 0 listens on a port that the system chose."""
    host = socket.gethostname()
    own = TCPStore(host, 0, control.size, is_master=True, wait_for_workers=False) if control.rank == 0 else None
    places = [json.loads(reply) for reply in control.exchange(json.dumps([host, own and own.port]).encode())]
    if own is not None:
        return own
    master, port = places[0]
    # A name that only its own host can resolve is common in containers; the loopback always works there.
    return TCPStore("127.0.0.1" if all(name == master for name, _ in places) else master, port, control.size)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as bytes: moving rows does no arithmetic, so every dtype travels exactly."""
    return rows.contiguous().view(-1).view(torch.uint8)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    if rows.shape[0] == count:
        return rows
    padded = rows.new_empty((count, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    # Sent, and left out again where it arrives.
    padded[rows.shape[0] :] = 0
    return padded


def _without_padding(gathered: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[size * most, ...] to [sum(counts), ...]."""
    whole = gathered.new_empty((sum(counts), *gathered.shape[1:]))
    for padded, rows in _runs(gathered, whole, counts):
        rows.copy_(padded[:, : rows.shape[1]])
    return whole


def _with_padding(partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[sum(counts), ...] to [size * most, ...]; what is between the blocks is zero."""
    gathered = partial.new_zeros((len(counts) * max(counts), *partial.shape[1:]))
    for padded, rows in _runs(gathered, partial, counts):
        padded[:, : rows.shape[1]] = rows
    return gathered


def _runs(
    padded: torch.Tensor, rows: torch.Tensor, counts: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views [ranks, most, ...] and [ranks, count, ...] for every run of ranks with equal counts: two in even splits."""
    most, rank, start = max(counts), 0, 0
    for count, group in itertools.groupby(counts):
        ranks = len(list(group))
        shape = rows.shape[1:]
        yield (
            padded[rank * most : (rank + ranks) * most].view(ranks, most, *shape),
            rows[start : start + ranks * count].view(ranks, count, *shape),
        )
        rank += ranks
        start += ranks * count
