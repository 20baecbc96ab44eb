"""From admitted requests to responses: prompts in steps, tokens of several requests together."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trt_redknot.admission.admit import Admission
from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.decode import Decoder
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.head import logits_of
from trt_redknot.engine.lookahead import Asked, DecodeSteps
from trt_redknot.engine.pool import CachePool, PoolRows, SequenceState
from trt_redknot.engine.prefill import Prefill
from trt_redknot.engine.response import Response
from trt_redknot.engine.sampling import Sampler
from trt_redknot.engine.step import Observation
from trt_redknot.engine.steps import Steps, drain
from trt_redknot.engine.tiles import ArtifactReader
from trt_redknot.observability.events import Tier
from trt_redknot.reports.ledgers import ledgers
from trt_redknot.reports.report import Report, RowCounts, Timings
from trt_redknot.request.layout import RequestLayout
from trt_redknot.request.request import Request
from trt_redknot.request.rows import RowPlan
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

    def close(self) -> None:
        """Let the leases go."""
        if self.admission is not None:
            self.admission.close()


@dataclass(kw_only=True, eq=False)
class Running:
    """A request while it is being answered: it has its place in the pool, then its first token, then more.

    Attributes:
        tokens: generated so far.
        plan: None before the prefill is done; so are `fanout` (own rows by experts run, None where no layer counts
            them) and `first_logits`.
        prefill_s, ttft_s, decode_s: wall clock; of requests that run by turns, the others' turns are in it.
    """

    admitted: Admitted
    state: SequenceState
    sampler: Sampler
    stop: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    plan: RowPlan | None = None
    fanout: torch.Tensor | None = None
    first_logits: torch.Tensor | None = None
    moved: dict[Tier, int] = field(default_factory=dict)
    late_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.stop

    @property
    def asked(self) -> Asked:
        """Its part of the next decode step."""
        return Asked(state=self.state, token=self.tokens[-1], greedy=self.sampler.greedy, last=self.left <= 1)

    @property
    def left(self) -> int:
        """Tokens until the limit."""
        return self.admitted.request.max_new_tokens - len(self.tokens)

    @property
    def done(self) -> bool:
        return self.stopped or self.left <= 0


class Generation:
    """Answers admitted requests over one cache pool. Collective: every rank makes the same calls in the same order.

    A request is begun, prefilled, decoded together with others, answered and closed; it may be closed at any time.

    Args:
        pool: where the requests' caches are.
        ahead: queue decode steps before they are asked for; left out: where that pays (:mod:`.lookahead`).
    """

    def __init__(self, context: RankContext, pool: CachePool, *, ahead: bool | None = None) -> None:
        self._context = context
        self._steps = DecodeSteps(Decoder(context, pool), ahead=ahead)
        self.pool = pool

    @staticmethod
    def size(geometry: ModelGeometry, item: Admitted) -> PoolRows:
        """Pool rows that a request takes from begin to close."""
        length = len(item.layout.tokens) + item.request.max_new_tokens
        return PoolRows.of_sequence(geometry, length, len(item.layout.segments))

    def run(self, batch: Sequence[Admitted]) -> list[Response]:
        """One response a request, in order."""
        running = [self.begin(item) for item in batch]
        for each in running:
            drain(self.prefill(each))
        while unfinished := [each for each in running if not each.done]:
            self.decode(unfinished)
        return [self.respond(each) for each in running]

    def begin(self, item: Admitted) -> Running:
        """Give a request its place. ValueError where the pool has no room: ask `pool.has_room` before."""
        geometry, request = self._context.geometry, item.request
        stop = geometry.stop_tokens if request.stop_tokens is None else request.stop_tokens
        return Running(
            admitted=item,
            state=self.pool.open(self.size(geometry, item), item.layout.segments),
            sampler=Sampler(request.sampling),
            stop=frozenset(stop),
        )

    def close(self, running: Running) -> None:
        """Take a request's place away. Its tokens and its response stay."""
        self.pool.close(running.state)

    def prefill(self, running: Running) -> Steps[None]:
        """All prompt rows through all layers, in steps; with the last step comes the first token."""
        context, item, state = self._context, running.admitted, running.state
        started = time.perf_counter()
        leases = [document.lease for document in item.admission.documents] if item.admission is not None else []
        documents = [segment for segment in item.layout.segments if segment.kind is not SegmentKind.FRESH]
        pairs = zip(documents, leases, strict=True) if item.reuses else ()
        readers: dict[int, ArtifactReader] = {segment.index: lease for segment, lease in pairs if lease is not None}
        cached = Documents(
            context.geometry, state.segments, readers, local_width=context.local_width, dtype=context.dtype,
            device=context.device, source=context.tiles.source() if readers else None,
        )  # fmt: skip
        try:
            prefilled = yield from Prefill(
                context,
                self.pool,
                state,
                item.layout.tokens,
                cached,
                item.request.reuse if item.reuses else None,
                Observation(fanout_layers=context.profile.reusable),
            ).run()
        finally:
            cached.close()
        running.prefill_s = time.perf_counter() - started
        last = int(np.flatnonzero(prefilled.rows.positions == state.length - 1)[0])
        # What is kept while the request decodes leaves out the streams: they are the largest thing of a prefill.
        running.plan, running.fanout = prefilled.plan, prefilled.observation.fanout()
        running.first_logits = logits_of(
            context.stages, context.collectives, context.geometry, prefilled.streams, prefilled.rows, [last]
        )[0]
        running.tokens.append(running.sampler.draw(running.first_logits))
        running.ttft_s = time.perf_counter() - started
        running.moved, running.late_s = dict(cached.moved), sum(cached.lateness())

    def decode(self, batch: Sequence[Running]) -> None:
        """One more token for each of these requests, which are prefilled and not done."""
        started = time.perf_counter()
        found = self._steps.next([each.asked for each in batch])
        if all(each.sampler.greedy for each in batch):
            drawn = found.tokens()
        else:
            drawn = [each.sampler.draw(row) for each, row in zip(batch, found.logits(), strict=True)]
        elapsed = time.perf_counter() - started
        for each, token in zip(batch, drawn, strict=True):
            each.tokens.append(token)
            each.decode_s += elapsed

    def respond(self, running: Running) -> Response:
        """The answer so far, with its report. Collective."""
        context, admitted = self._context, running.admitted
        assert running.plan is not None
        assert running.first_logits is not None
        histogram, moved = self._over_ranks(running)
        reuse = admitted.request.reuse
        epilogue = reuse.epilogue if admitted.reuses and reuse is not None else "full"
        reason: FallbackReason | None = None if admitted.admission is None else admitted.admission.reason
        report = Report(
            arm="reuse" if admitted.reuses else "recompute",
            admitted=admitted.reuses,
            fallback_reason=reason,
            fallback_detail=None if admitted.admission is None else admitted.admission.detail,
            rows=RowCounts.of(running.plan),
            ledgers=ledgers(context.geometry, context.profile, running.plan, epilogue, histogram),
            k_histogram=histogram,
            timings=Timings(
                ttft_s=running.ttft_s, prefill_s=running.prefill_s, decode_s=running.decode_s,
                admission_s=admitted.admission_s, late_s=running.late_s,
            ),
            bytes_by_tier=moved,
            request_id=admitted.request.request_id,
        )  # fmt: skip
        return Response(
            tokens=list(running.tokens),
            first_logits=running.first_logits,
            finish_reason="stop" if running.stopped else "length",
            report=report,
            plan=running.plan,
        )

    def _over_ranks(self, running: Running) -> tuple[list[int], dict[str, int]]:
        """The fanout histogram and the artifact bytes by tier, of all ranks."""
        own = [None if running.fanout is None else running.fanout.tolist(), running.moved]
        replies = [json.loads(reply) for reply in self._context.collectives.exchange(json.dumps(own).encode())]
        histograms = [histogram for histogram, _ in replies if histogram is not None]
        moved: Counter[str] = Counter()
        for _, own_bytes in replies:
            moved.update(own_bytes)
        return [sum(column) for column in zip(*histograms, strict=True)], dict(moved)
