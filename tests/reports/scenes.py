"""Requests and responses for the tests of the reports."""

from __future__ import annotations

import numpy as np
import torch

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.response import Response
from trt_redknot.reports.ledgers import adaptive_layers, ledgers
from trt_redknot.reports.report import Report, RowCounts, Timings
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import Protection, RowClass, Segment, SegmentKind


def plan_of(lengths: list[int], seed: int = 0, *, prefix: bool = True) -> RowPlan:
    """Documents of all but the last length, then a fresh question; classes and reasons at random."""
    random = np.random.default_rng(seed)
    rows = sum(lengths)
    classes = np.zeros(rows, dtype=np.uint8)
    segments, start = [], 0
    for index, length in enumerate(lengths):
        span = slice(start, start + length)
        if index == len(lengths) - 1:
            kind = SegmentKind.FRESH
        elif index == 0 and prefix:
            kind = SegmentKind.PREFIX
            classes[span] = RowClass.OMITTED
        else:
            kind = SegmentKind.RELOCATED
            classes[span] = random.integers(0, 3, length)
        artifact = None if kind is SegmentKind.FRESH else f"artifact-{index:04d}"
        segments.append(Segment(index=index, kind=kind, start=start, length=length, artifact_id=artifact))
        start += length
    reasons = random.integers(1, 64, rows).astype(np.uint8)
    protections = np.where(classes == RowClass.PROTECTED, reasons, 0).astype(np.uint8)
    return RowPlan(segments=tuple(segments), classes=classes, protections=protections)


def fresh_plan(rows: int) -> RowPlan:
    return RowPlan(
        segments=(Segment(index=0, kind=SegmentKind.FRESH, start=0, length=rows),),
        classes=np.zeros(rows, dtype=np.uint8),
        protections=np.full(rows, Protection.NEW, dtype=np.uint8),
    )


def response_of(
    geometry: ModelGeometry,
    profile: SplitProfile,
    plan: RowPlan,
    *,
    admitted: bool,
    tokens: list[int],
    logits: torch.Tensor,
    ttft_s: float = 1.0,
    reason: FallbackReason | None = None,
    detail: str | None = None,
) -> Response:
    live = plan.rows - plan.count(RowClass.OMITTED)
    pairs = live * len(adaptive_layers(geometry, profile))
    histogram = [0, 0, 0, pairs - pairs // 3, 0, 0, pairs // 3]
    report = Report(
        arm="reuse" if admitted else "recompute",
        admitted=admitted,
        fallback_reason=reason,
        fallback_detail=detail,
        rows=RowCounts.of(plan),
        ledgers=ledgers(geometry, profile, plan, "full", histogram if admitted else ()),
        k_histogram=histogram if admitted else [],
        timings=Timings(ttft_s=ttft_s, prefill_s=ttft_s / 2, decode_s=0.25, admission_s=0.01, stages={"leading": 0.5}),
        bytes_by_tier={"host": 1234567},
        request_id="request-1",
    )
    return Response(tokens=tokens, first_logits=logits, finish_reason="length", report=report, plan=plan)
