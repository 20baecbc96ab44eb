"""Time to first token of one arm, on a rank that has its artifacts in memory."""

from __future__ import annotations

import time

import numpy as np
import torch

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.head import logits_of
from trt_redknot.engine.pool import CachePool
from trt_redknot.engine.prefill import Prefill, Prefilled
from trt_redknot.engine.step import Observation
from trt_redknot.evaluation.standin import DeviceArtifact
from trt_redknot.model.layers import Weights
from trt_redknot.request.segments import Segment, SegmentKind

QUESTION = 256


def segment_table(length: int, documents: int, *, reuse: bool) -> list[Segment]:
    """Documents of equal length, the first a prefix, then a question; or the same rows as one fresh segment."""
    if not reuse:
        return [Segment(index=0, kind=SegmentKind.FRESH, start=0, length=length)]
    size = (length - QUESTION) // documents
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


def first_token(
    context: RankContext, shared: Weights, segments: list[Segment], artifacts: dict[int, DeviceArtifact],
    policy: ReusePolicy | None,
) -> tuple[float, Prefilled]:  # fmt: skip
    """Seconds from model-forward entry to the first token."""
    geometry, length = context.geometry, segments[-1].stop
    pool = CachePool(geometry, [length + 1], [len(segments)], dtype=context.dtype, device=context.device)
    state = pool.sequences[0]
    state.segments = list(segments)
    documents = Documents(
        geometry, segments, dict(artifacts), local_width=context.local_width, dtype=context.dtype, device=context.device
    )
    tokens = np.random.default_rng(0).integers(0, geometry.vocab, length)
    torch.cuda.synchronize()
    started = time.perf_counter()
    prefilled = Prefill(
        context, pool, state, tokens, documents, policy, Observation(fanout_layers=context.profile.reusable)
    ).run()
    last = int(np.flatnonzero(prefilled.rows.positions == length - 1)[0])
    logits_of(context.ops, context.collectives, geometry, shared, prefilled.streams, prefilled.rows, [last])[
        0
    ].argmax().item()
    return time.perf_counter() - started, prefilled
