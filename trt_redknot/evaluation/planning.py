"""Planning models: what reuse could save, worked out from geometry and policy. Projections, never measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.evaluation.ttft import QUESTION, document_length, segment_table
from trt_redknot.reports.ledgers import ledgers
from trt_redknot.reports.report import Ledgers
from trt_redknot.request.controller import protect, select_rows
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import RowClass, Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One policy at one length, in counted units.

    Attributes:
        token_rows, head_rows, arithmetic: shares saved against recomputing the prompt.
        arithmetic_speedup: recomputed over executed arithmetic: what the clock would show if only arithmetic cost time.
        construction: arithmetic of making all artifacts, in recomputations of the prompt.
        break_even: requests over the same documents after which making them has paid, None where it never does.
    """

    length: int
    documents: int
    token_rows: float
    head_rows: float
    arithmetic: float
    arithmetic_speedup: float
    construction: float
    break_even: float | None

    def to_json(self) -> dict[str, float | int | None]:
        return {
            "length": self.length,
            "documents": self.documents,
            "token_rows_saved": self.token_rows,
            "head_rows_saved": self.head_rows,
            "arithmetic_saved": self.arithmetic,
            "arithmetic_speedup": self.arithmetic_speedup,
            "construction_in_recomputations": self.construction,
            "break_even_requests": self.break_even,
        }


def ceiling(geometry: ModelGeometry, profile: SplitProfile) -> float:
    """The largest share of logical head-rows that reuse can save: Local heads of reusable layers over all heads."""
    local = geometry.heads - geometry.output_groups
    return len(profile.reusable) * local / (geometry.layers * geometry.heads)


def project(
    geometry: ModelGeometry, profile: SplitProfile, length: int, documents: int, policy: ReusePolicy
) -> Projection:
    """Documents of equal length, the first a prefix, then a question. Which rows are chosen by score does not change
    how many are, so no network is needed. Adaptive fanout is left out: how many experts run depends on the network."""
    saved = _ledgers(geometry, profile, segment_table(length, documents, reuse=True), policy)
    size = document_length(length, documents, question=QUESTION)
    alone = [Segment(index=0, kind=SegmentKind.FRESH, start=0, length=size)]
    construction = documents * _ledgers(geometry, profile, alone, None).arithmetic.total
    total = saved.arithmetic.total
    won = saved.arithmetic.saved
    return Projection(
        length=length,
        documents=documents,
        token_rows=saved.token_rows.share,
        head_rows=saved.logical_head_rows.share,
        arithmetic=saved.arithmetic.share,
        arithmetic_speedup=total / (total - won),
        construction=construction / total,
        break_even=construction / won if won else None,
    )


def _ledgers(
    geometry: ModelGeometry, profile: SplitProfile, segments: Sequence[Segment], policy: ReusePolicy | None
) -> Ledgers:
    window = geometry.csa_ratio
    if policy is None:
        rows = segments[-1].stop
        plan = RowPlan(
            segments=tuple(segments),
            classes=np.full(rows, RowClass.PROTECTED, dtype=np.uint8),
            protections=np.zeros(rows, dtype=np.uint8),
        )
        return ledgers(geometry, profile, plan, "full")
    live = any(geometry.attention_kinds[layer] is AttentionKind.CSA for layer in range(profile.leading_fence))
    flags = protect(segments, policy, window, boundary=geometry.boundary)
    plan = select_rows(
        segments, flags, policy, window=window, scores=None, live_scores=live,
        top_entries=geometry.index_topk if policy.top_entries is None else policy.top_entries,
    )  # fmt: skip
    return ledgers(geometry, profile, plan, policy.epilogue)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A projection beside a measured point of the same length and policy."""

    length: int
    arm: str
    projected_rows: float
    measured_rows: float
    projected_speedup: float
    measured_speedup: float

    def to_json(self) -> Mapping[str, float | int | str]:
        return {
            "length": self.length,
            "arm": self.arm,
            "projected_token_rows_saved": self.projected_rows,
            "counted_token_rows_saved": self.measured_rows,
            "projected_arithmetic_speedup": self.projected_speedup,
            "measured_speedup": self.measured_speedup,
        }
