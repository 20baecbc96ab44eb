"""A small network, ranks as threads, and file systems that fail: what the store's and admission's tests share."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from trt_redknot.artifacts import ArtifactFormat, ArtifactIdentity, ArtifactStore, Part, PartSpec
from trt_redknot.artifacts.files import Files
from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RopeGeometry, RouterKind
from trt_redknot.config.profile import SplitProfile

Result = TypeVar("Result")
_KINDS = (
    AttentionKind.SLIDING,
    AttentionKind.CSA,
    AttentionKind.HCA,
    AttentionKind.CSA,
    AttentionKind.HCA,
    AttentionKind.CSA,
)

GEOMETRY = ModelGeometry(
    vocab=512,
    hidden=32,
    heads=16,
    head_dim=48,
    rope_dim=16,
    q_lora_rank=16,
    output_groups=8,
    output_lora_rank=8,
    window=16,
    csa_ratio=4,
    hca_ratio=16,
    attention_kinds=_KINDS,
    router_kinds=(RouterKind.HASH,) + (RouterKind.LEARNED,) * 5,
    index_heads=2,
    index_dim=24,
    index_topk=4,
    experts=8,
    experts_per_token=6,
    expert_width=16,
    routed_scale=1.5,
    scoring="sqrtsoftplus",
    swiglu_limit=10.0,
    streams=4,
    sinkhorn_iterations=4,
    hc_eps=1e-6,
    norm_eps=1e-6,
    rope_sliding=RopeGeometry(theta=1e4, dim=16),
    rope_compressed=RopeGeometry(theta=1.6e5, dim=16, factor=16.0, original_positions=64),
    max_positions=4096,
    bos_token=0,
    stop_tokens=(1,),
)
# More changes of the disk than any one operation of the tests makes.
MOST_CHANGES = 400
PROFILE = SplitProfile.default(GEOMETRY)


def identity(
    form: ArtifactFormat = ArtifactFormat.FLOAT32, checkpoint: str = "a" * 64, profile: SplitProfile = PROFILE
) -> ArtifactIdentity:
    return ArtifactIdentity.of(GEOMETRY, profile, checkpoint_fingerprint=checkpoint, form=form)


class _Round:
    """Where threads meet: a barrier and one slot per rank."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.slots: list[object] = [None] * size


class ThreadCollectives:
    """Ranks as threads of one process. A rank that never comes breaks the barrier for all, so no test hangs."""

    def __init__(self, rank: int, size: int, meeting: _Round) -> None:
        self.rank = rank
        self.size = size
        self.exchanges = 0
        self._meeting = meeting

    def _meet(self, value: object) -> list[object]:
        self._meeting.slots[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.slots)
        self._meeting.barrier.wait()
        return values

    def exchange(self, payload: bytes) -> list[bytes]:
        self.exchanges += 1
        return [bytes(value) for value in self._meet(payload)]  # type: ignore[arg-type]

    def barrier(self) -> None:
        self._meet(None)

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return torch.cat(self._meet(own))  # type: ignore[arg-type]

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet(partial)).sum(0)  # type: ignore[arg-type]

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return self.all_reduce(partial).split(list(counts))[self.rank]

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        pieces = [sent.split(list(counts))[self.rank] for sent, counts in self._meet((rows, send_counts))]  # type: ignore[misc]
        assert [len(piece) for piece in pieces] == list(receive_counts), "the ranks expect different numbers of rows"
        return torch.cat(pieces)


def together(size: int, work: Callable[[Collectives], Result], timeout_s: float = 30.0) -> list[Result | BaseException]:
    """Run `work` on `size` ranks at once; each rank's result, or what it raised."""
    if size == 1:
        return [_outcome(work, LocalCollectives())]
    meeting = _Round(size, timeout_s)
    results: list[Result | BaseException] = [AssertionError("did not run")] * size

    def run(rank: int) -> None:
        results[rank] = _outcome(work, ThreadCollectives(rank, size, meeting))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    return results


def _outcome(work: Callable[[Collectives], Result], collectives: Collectives) -> Result | BaseException:
    try:
        return work(collectives)
    except BaseException as error:  # noqa: BLE001 - handed to the test, which looks at it
        return error


def part_values(spec: PartSpec, rank: int, seed: int = 0) -> torch.Tensor:
    """fp32 values of one part that anybody can make again; those of LOCAL differ by rank."""
    owner = rank + 1 if spec.by_rank else 0
    layer = -1 if spec.layer is None else spec.layer
    number = (seed * 1000 + owner) * 1000 + layer * 10 + list(Part).index(spec.part)
    generator = torch.Generator().manual_seed(number + 10)
    return torch.randn(spec.shape, generator=generator).to(torch.bfloat16).float()


def build_artifact(
    store: ArtifactStore,
    tokens: Sequence[int],
    collectives: Collectives,
    *,
    who: ArtifactIdentity | None = None,
    seed: int = 0,
    rebuild: bool = False,
    wait_s: float = 30.0,
) -> str:
    """Build with made-up values; rank 0 adds the common parts, every rank its own."""
    with store.begin(
        tokens,
        identity=who or identity(),
        geometry=GEOMETRY,
        profile=PROFILE,
        collectives=collectives,
        rebuild=rebuild,
        wait_s=wait_s,
    ) as build:
        if not build.exists:
            for spec in build.specs:
                if spec.by_rank or collectives.rank == 0:
                    build.add(spec, part_values(spec, collectives.rank, seed))
        return build.publish()


def build_on_ranks(root: Path, tokens: Sequence[int], size: int, **options: object) -> str:
    """The id of an artifact that `size` ranks built with one store object each."""
    results = together(size, lambda ranks: build_artifact(ArtifactStore(root), tokens, ranks, **options))  # type: ignore[arg-type]
    assert len(set(results)) == 1, results
    assert isinstance(results[0], str), results
    return results[0]


class FailingFiles(Files):
    """Raises an OSError at the n-th change of the disk (counted from 0), and at all later ones if it is to last."""

    def __init__(self, at: int, *, code: int = errno.ENOSPC, lasting: bool = False) -> None:
        self.at = at
        self.calls = 0
        self.code = code
        self.lasting = lasting

    def _count(self) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call == self.at or (self.lasting and call > self.at):
            self.fault()

    def fault(self) -> None:
        raise OSError(self.code, os.strerror(self.code))

    def make_folder(self, path: Path) -> None:
        self._count()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._count()
        return super().create(path)

    def write(self, fd: int, data: memoryview) -> int:
        self._count()
        # Short writes are part of what a write may do.
        return super().write(fd, data[: len(data) // 2] if self.calls % 8 == 0 and len(data) > 1 else data)

    def sync(self, fd: int) -> None:
        # A killed process loses nothing it wrote: only a power cut needs the real call, most of a trial's time.
        self._count()

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def touch(self, fd: int, at_ns: int) -> None:
        self._count()
        super().touch(fd, at_ns)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count()
        super().remove_folder(path)

    def remove_tree(self, path: Path) -> None:
        self._count()
        super().remove_tree(path)


class KillingFiles(FailingFiles):
    """Ends the process with SIGKILL at the n-th change of the disk."""

    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def check_store(root: Path, kept: str) -> set[str]:
    """Everything visible is whole, `kept` is among it, nothing half done survives gc. Ids of what is visible."""
    store = ArtifactStore(root)
    assert all(verdict.sound for verdict in store.verify(quarantine=False))
    store.open(kept, rank=0).close()
    store.gc()
    for leftover in (".building", ".trash"):
        assert not (root / leftover).exists() or not list((root / leftover).iterdir())
    assert store.stat().reserved_bytes == 0
    return {listed.published.artifact_id for listed in store.ls()}
