"""From admitted requests to responses: prefill one by one, then decode the batch together."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trt_redknot.admission.admit import Admission
from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.decode import decode_step
from trt_redknot.engine.documents import ArtifactReader, Documents
from trt_redknot.engine.head import logits_of
from trt_redknot.engine.pool import CachePool, SequenceState
from trt_redknot.engine.prefill import Prefill, Prefilled
from trt_redknot.engine.response import Response
from trt_redknot.engine.sampling import Sampler
from trt_redknot.engine.step import Observation
from trt_redknot.model.layers import Weights
from trt_redknot.reports.ledgers import ledgers
from trt_redknot.reports.report import Report, RowCounts, Timings
from trt_redknot.request.layout import RequestLayout
from trt_redknot.request.request import Request
from trt_redknot.request.segments import SegmentKind


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A request that is ready to run.

    Attributes:
        layout: its tokens and segments; one fresh segment in the recompute arm.
        admission: the ranks' agreement; None where the request names no artifact or asked for recomputation.
        admission_s: seconds spent on it.
    """

    request: Request
    layout: RequestLayout
    admission: Admission | None
    admission_s: float

    @property
    def reuses(self) -> bool:
        return self.admission is not None and self.admission.admitted


@dataclass(kw_only=True)
class _Open:
    """A request while it is being answered."""

    admitted: Admitted
    state: SequenceState
    sampler: Sampler
    stop: frozenset[int]
    prefilled: Prefilled
    first_logits: torch.Tensor
    prefill_s: float
    ttft_s: float
    tokens: list[int] = field(default_factory=list)
    decode_s: float = 0.0

    @property
    def stopped(self) -> bool:
        return self.tokens[-1] in self.stop

    @property
    def done(self) -> bool:
        return self.stopped or len(self.tokens) >= self.admitted.request.max_new_tokens


class Generation:
    """Answers a batch of admitted requests. Collective.

    Args:
        shared: this rank's tensors outside the layers.
    """

    def __init__(self, context: RankContext, shared: Weights) -> None:
        self._context = context
        self._shared = shared

    def run(self, batch: Sequence[Admitted]) -> list[Response]:
        """One response a request, in order."""
        context = self._context
        pool = CachePool(
            context.geometry,
            [len(item.layout.tokens) + item.request.max_new_tokens for item in batch],
            [len(item.layout.segments) for item in batch],
            dtype=context.dtype,
            device=context.device,
        )
        running = [self._prefill(item, pool, state) for item, state in zip(batch, pool.sequences, strict=True)]
        self._decode(pool, running)
        return [self._respond(item) for item in running]

    def _prefill(self, item: Admitted, pool: CachePool, state: SequenceState) -> _Open:
        context, geometry = self._context, self._context.geometry
        started = time.perf_counter()
        state.segments = list(item.layout.segments)
        leases = [document.lease for document in item.admission.documents] if item.admission is not None else []
        documents = [segment for segment in item.layout.segments if segment.kind is not SegmentKind.FRESH]
        pairs = zip(documents, leases, strict=True) if item.reuses else ()
        readers: dict[int, ArtifactReader] = {segment.index: lease for segment, lease in pairs if lease is not None}
        prefilled = Prefill(
            context,
            pool,
            state,
            item.layout.tokens,
            Documents(
                geometry, state.segments, readers, local_width=context.local_width, dtype=context.dtype,
                device=context.device,
            ),
            item.request.reuse if item.reuses else None,
            Observation(fanout_layers=context.profile.reusable),
        ).run()  # fmt: skip
        prefill_s = time.perf_counter() - started
        last = int(np.flatnonzero(prefilled.rows.positions == state.length - 1)[0])
        logits = logits_of(
            context.ops, context.collectives, geometry, self._shared, prefilled.streams, prefilled.rows, [last]
        )[0]
        stop = geometry.stop_tokens if item.request.stop_tokens is None else item.request.stop_tokens
        opened = _Open(
            admitted=item,
            state=state,
            sampler=Sampler(item.request.sampling),
            stop=frozenset(stop),
            prefilled=prefilled,
            first_logits=logits,
            prefill_s=prefill_s,
            ttft_s=0.0,
        )
        opened.tokens.append(opened.sampler.draw(logits))
        opened.ttft_s = time.perf_counter() - started
        return opened

    def _decode(self, pool: CachePool, running: Sequence[_Open]) -> None:
        context = self._context
        while batch := [item for item in running if not item.done]:
            started = time.perf_counter()
            streams, rows = decode_step(
                context, pool, [item.state for item in batch], [item.tokens[-1] for item in batch]
            )
            logits = logits_of(
                context.ops, context.collectives, context.geometry, self._shared, streams, rows, range(len(batch))
            )
            elapsed = time.perf_counter() - started
            for item, row in zip(batch, logits, strict=True):
                item.tokens.append(item.sampler.draw(row))
                item.decode_s += elapsed

    def _respond(self, item: _Open) -> Response:
        context, admitted, prefilled = self._context, item.admitted, item.prefilled
        histogram, loaded = self._over_ranks(prefilled)
        reuse = admitted.request.reuse
        epilogue = reuse.epilogue if admitted.reuses and reuse is not None else "full"
        reason: FallbackReason | None = None if admitted.admission is None else admitted.admission.reason
        report = Report(
            arm="reuse" if admitted.reuses else "recompute",
            admitted=admitted.reuses,
            fallback_reason=reason,
            fallback_detail=None if admitted.admission is None else admitted.admission.detail,
            rows=RowCounts.of(prefilled.plan),
            ledgers=ledgers(context.geometry, context.profile, prefilled.plan, epilogue, histogram),
            k_histogram=histogram,
            timings=Timings(
                ttft_s=item.ttft_s, prefill_s=item.prefill_s, decode_s=item.decode_s, admission_s=admitted.admission_s
            ),
            bytes_by_tier={"disk": loaded},
            request_id=admitted.request.request_id,
        )
        return Response(
            tokens=item.tokens,
            first_logits=item.first_logits,
            finish_reason="stop" if item.stopped else "length",
            report=report,
            plan=prefilled.plan,
        )

    def _over_ranks(self, prefilled: Prefilled) -> tuple[list[int], int]:
        """The fanout histogram and the artifact bytes of all ranks."""
        fanout = prefilled.observation.fanout
        own = [None if fanout is None else fanout.tolist(), prefilled.loaded_bytes]
        replies = [json.loads(reply) for reply in self._context.collectives.exchange(json.dumps(own).encode())]
        histograms = [histogram for histogram, _ in replies if histogram is not None]
        return [sum(column) for column in zip(*histograms, strict=True)], sum(loaded for _, loaded in replies)
