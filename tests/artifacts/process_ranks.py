"""Ranks as forked processes, so that one of them can be killed: what its death does to the others and to the store."""

from __future__ import annotations

import random
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.artifacts.processes import Child
from tests.artifacts.support import FailingFiles, KillingFiles, build_artifact, check_store, identity
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import CollectiveError, RedKnotError

OLD, NEW = [1] * 21, [2] * 21
_NEVER = 10**9
_HEAD = struct.Struct("<Q")


class ProcessCollectives:
    """`exchange` over a socket to every other rank; the others' sockets end when a rank dies."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = peers

    def exchange(self, payload: bytes) -> list[bytes]:
        try:
            for peer in self._peers.values():
                peer.sendall(_HEAD.pack(len(payload)) + payload)
            others = {rank: self._receive(peer) for rank, peer in self._peers.items()}
        except OSError as error:
            raise CollectiveError("a rank died") from error
        return [others[rank] if rank != self.rank else payload for rank in range(self.size)]

    @staticmethod
    def _receive(peer: socket.socket) -> bytes:
        def take(count: int) -> bytes:
            data = b""
            while len(data) < count:
                piece = peer.recv(count - len(data))
                if not piece:
                    raise CollectiveError("a rank died")
                data += piece
            return data

        return take(_HEAD.unpack(take(_HEAD.size))[0])


def start_ranks(size: int, work: Callable[[ProcessCollectives], object]) -> list[Child]:
    """One process a rank; a rank that is told of another's death leaves with status 1."""
    ends: dict[tuple[int, int], socket.socket] = {}
    for one in range(size):
        for other in range(one):
            ends[one, other], ends[other, one] = socket.socketpair()

    def run(rank: int) -> None:
        for (owner, _), end in ends.items():
            if owner != rank:
                end.close()
        try:
            work(ProcessCollectives(rank, {other: end for (owner, other), end in ends.items() if owner == rank}))  # type: ignore[arg-type]
        except RedKnotError as error:
            if not isinstance(error, CollectiveError):
                print(error, file=sys.stderr)
            raise SystemExit(3) from error

    children = [Child(lambda _, rank=rank: run(rank), quiet=SystemExit) for rank in range(size)]
    for end in ends.values():
        end.close()
    return children


@dataclass(kw_only=True)
class KillTally:
    """Trials, and how many of them ended with a death and with a publication."""

    trials: int = 0
    killed: int = 0
    published: int = 0


def kill_ranks(root: Path, *, trials: int, size: int = 4, seed: int = 0) -> KillTally:
    """Build on `size` ranks while one of them is killed at a random change of the disk; half the time all die at once.

    After every trial the store must open, serve what was published, show nothing else, and be free of remains.
    """
    draw, tally = random.Random(seed), KillTally()
    kept = _build(root, OLD, size)
    new = ArtifactStore(root).artifact_id(NEW, identity())
    # Rank 0 changes the disk most; the others only write their files.
    most = [_changes(root, size, rank) for rank in range(size)]
    for _ in range(trials):
        victim = draw.randrange(size)
        at = draw.randrange(most[victim] + 1)
        files = [KillingFiles(at) if rank == victim else FailingFiles(_NEVER) for rank in range(size)]
        children = _start(root, size, files)
        statuses = [children[victim].wait()]
        if statuses[0] == -9 and draw.random() < 0.5:
            for child in children:
                child.kill()
        statuses = [child.wait() for child in children]
        visible = check_store(root, kept)
        assert kept in visible
        assert visible <= {kept, new}, visible
        if all(status == 0 for status in statuses):
            assert new in visible
            tally.published += 1
        tally.killed += statuses[victim] == -9
        tally.trials += 1
    return tally


def _start(root: Path, size: int, files: Sequence[FailingFiles]) -> list[Child]:
    return start_ranks(
        size,
        lambda ranks: build_artifact(ArtifactStore(root, files=files[ranks.rank]), NEW, ranks, rebuild=True),  # type: ignore[arg-type]
    )


def _build(root: Path, tokens: list[int], size: int) -> str:
    if size == 1:
        return build_artifact(ArtifactStore(root), tokens, LocalCollectives())
    children = start_ranks(size, lambda ranks: build_artifact(ArtifactStore(root), tokens, ranks))  # type: ignore[arg-type]
    assert [child.wait() for child in children] == [0] * size
    return ArtifactStore(root).ls()[0].published.artifact_id


def _changes(root: Path, size: int, rank: int) -> int:
    """How often a rank changes the disk in an undisturbed build, counted in that rank's process."""
    log = root.parent / f"changes-{rank}"

    def work(ranks: ProcessCollectives) -> None:
        files = FailingFiles(_NEVER)
        build_artifact(ArtifactStore(root, files=files), NEW, ranks, rebuild=True)  # type: ignore[arg-type]
        if ranks.rank == rank:
            log.write_text(str(files.calls))

    assert [child.wait() for child in start_ranks(size, work)] == [0] * size
    return int(log.read_text())
