"""Time to first token of both arms on a rank that has its artifacts in memory, and what making the artifacts costs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.build import ArtifactBuild
from trt_redknot.artifacts.contents import PartSpec, artifact_parts
from trt_redknot.artifacts.copies import HostCopies, HostCopy
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.artifacts.layout import file_of
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.head import logits_of
from trt_redknot.engine.pool import CachePool, PoolRows, SequenceState
from trt_redknot.engine.prefill import Prefill, Prefilled
from trt_redknot.engine.producer import Producer
from trt_redknot.engine.step import Observation
from trt_redknot.engine.steps import drain
from trt_redknot.engine.tiles import ArtifactReader
from trt_redknot.observability.events import Tier
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import RowClass, Segment, SegmentKind

QUESTION = 256


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """One prefill up to its first token.

    Attributes:
        seconds: model-forward entry to first token, on this rank.
        logits: fp32 [V].
        asked: fp32 [k, V] of the positions that were asked for; made after the clock stopped.
        late_s: of it, waiting for artifact tiles that were read ahead.
        moved: artifact bytes, by where they were found.
    """

    seconds: float
    logits: torch.Tensor
    plan: RowPlan
    late_s: float
    moved: Mapping[Tier, int]
    pool: CachePool
    state: SequenceState
    asked: torch.Tensor | None


@dataclass(kw_only=True)
class ArmTimes:
    """What one arm took, run after run, after warm-up."""

    seconds: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    plan: RowPlan | None = None
    moved: Mapping[Tier, int] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        return max(self.seconds) - min(self.seconds)


def segment_table(length: int, documents: int, *, reuse: bool, question: int = QUESTION) -> list[Segment]:
    """Documents of equal length, the first a prefix, then a question; or the same rows as one fresh segment."""
    if not reuse:
        return [Segment(index=0, kind=SegmentKind.FRESH, start=0, length=length)]
    size = document_length(length, documents, question=question)
    segments = [
        Segment(
            index=index,
            kind=SegmentKind.RELOCATED if index else SegmentKind.PREFIX,
            start=index * size,
            length=size,
            artifact_id=str(index),
        )
        for index in range(documents)
    ]
    start = documents * size
    return [*segments, Segment(index=documents, kind=SegmentKind.FRESH, start=start, length=length - start)]


def document_length(length: int, documents: int, *, question: int = QUESTION) -> int:
    """Tokens of each document, whole 128-token windows where there is at least one."""
    size = (length - question) // documents
    return size // 128 * 128 or size


def prompt(geometry: ModelGeometry, length: int, seed: int = 0) -> NDArray[np.int64]:
    """The tokens of every request of this length and seed: int64 [length]."""
    return np.random.default_rng(seed).integers(0, geometry.vocab, length)


def first_token(
    context: RankContext,
    segments: Sequence[Segment],
    artifacts: Mapping[int, ArtifactReader],
    policy: ReusePolicy | None,
    *,
    room: int = 1,
    asked: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> FirstToken:
    """One prefill. Collective.

    Args:
        artifacts: by segment; not read where `policy` is None.
        room: tokens the cache has place for after the prompt.
        asked: int64 [k], positions whose logits are wanted besides the last one's; they must run in the last layer.
        seed: of the prompt.
    """
    geometry, length = context.geometry, segments[-1].stop
    size = PoolRows.of_sequence(geometry, length + room, len(segments))
    pool = CachePool(geometry, size, dtype=context.dtype, device=context.device)
    state = pool.open(size, segments)
    readers = artifacts if policy is not None else {}
    source = context.tiles.source()
    documents = Documents(
        geometry, segments, readers, local_width=context.local_width, dtype=context.dtype, device=context.device,
        source=source,
    )  # fmt: skip
    try:
        tokens = prompt(geometry, length, seed)
        context.collectives.barrier()
        finish(context.device)
        started = time.perf_counter()
        observe = Observation(fanout_layers=context.profile.reusable)
        prefilled = drain(Prefill(context, pool, state, tokens, documents, policy, observe).run())
        logits = _logits_at(context, prefilled, np.array([length - 1]))[0]
        int(logits.argmax())
        seconds = time.perf_counter() - started
        late = sum(source.lateness())
        more = None if asked is None else _logits_at(context, prefilled, asked)
    finally:
        documents.close()
    return FirstToken(
        seconds=seconds, logits=logits, plan=prefilled.plan, late_s=late, moved=dict(source.moved), pool=pool,
        state=state, asked=more,
    )  # fmt: skip


def _logits_at(context: RankContext, prefilled: Prefilled, positions: NDArray[np.int64]) -> torch.Tensor:
    """fp32 [k, V]. Collective."""
    order = np.argsort(prefilled.rows.positions)
    chosen = order[np.searchsorted(prefilled.rows.positions, positions, sorter=order)]
    return logits_of(
        context.stages, context.collectives, context.geometry, prefilled.streams, prefilled.rows, chosen.tolist()
    )


def time_arms(
    context: RankContext,
    length: int,
    documents: int,
    artifacts: Mapping[int, ArtifactReader],
    arms: Mapping[str, ReusePolicy | None],
    *,
    repeat: int,
    turn_done: Callable[[], None],
) -> dict[str, ArmTimes]:
    """Every arm `repeat` times after one warm-up, by turns. Collective.

    Raises:
        RuntimeError: an arm that reuses omitted no row.
    """
    times = {name: ArmTimes() for name in arms}
    for turn in range(repeat + 1):
        for name, policy in arms.items():
            segments = segment_table(length, documents, reuse=policy is not None)
            found = first_token(context, segments, artifacts, policy)
            times[name].plan, times[name].moved = found.plan, found.moved
            if policy is not None and not found.plan.count(RowClass.OMITTED):
                raise RuntimeError(f"arm {name} reused nothing at {length} tokens")
            if turn:
                times[name].seconds.append(found.seconds)
                times[name].late_s.append(found.late_s)
            # Its cache goes before the next one is made: two of the longest do not fit beside the weights.
            del found
            turn_done()
    return times


class _Unwritten:
    """Takes an artifact's tensors as the store does, up to the encoded tensors of a whole file in host memory, and
    writes none of them."""

    def __init__(self, specs: Sequence[PartSpec], form: ArtifactFormat, geometry: ModelGeometry, rank: int) -> None:
        self.specs = tuple(specs)
        self.bytes = 0
        self._form = form
        self._geometry = geometry
        self._rank = rank
        self._parts = Counter(file_of(spec, rank) for spec in specs)
        self._copies = HostCopies()
        self._open: dict[str, list[HostCopy]] = {}

    def add(self, spec: PartSpec, tensor: torch.Tensor) -> None:
        path = file_of(spec, self._rank)
        parts = self._open.setdefault(path, [])
        parts.append(self._copies.begin(TensorCodec.of(spec, self._form, self._geometry).encode(tensor)))
        self.bytes += parts[-1].nbytes
        if len(parts) == self._parts[path]:
            for part in self._open.pop(path):
                part.wait()


def build_seconds(context: RankContext, tokens: int, form: ArtifactFormat, *, repeat: int = 2) -> tuple[float, int]:
    """Seconds to make one document's artifact up to encoded tensors in host memory, after one that is not timed: the
    median, and this rank's bytes of it. Collective.

    Writing to the store is not in it: `benches/bench_store.py` measures disks.
    """
    made = [_build(context, tokens, form, seed) for seed in range(repeat + 1)]
    return statistics.median(seconds for seconds, _ in made[1:]), made[-1][1]


def _build(context: RankContext, tokens: int, form: ArtifactFormat, seed: int) -> tuple[float, int]:
    geometry = context.geometry
    specs = artifact_parts(geometry, context.profile, tokens, context.collectives.size)
    target = _Unwritten(specs, form, geometry, context.collectives.rank)
    pool = CachePool(geometry, Producer.size(geometry, tokens), dtype=context.dtype, device=context.device)
    ids = np.random.default_rng(seed).integers(0, geometry.vocab, tokens)
    context.collectives.barrier()
    finish(context.device)
    started = time.perf_counter()
    producer = Producer(context, cast("ArtifactBuild", target), ids, pool)
    drain(producer.run())
    finish(context.device)
    seconds = time.perf_counter() - started
    producer.close()
    return seconds, target.bytes


def finish(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
