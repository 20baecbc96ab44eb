"""The three counted ledgers of a request, as pure functions of its row plan (docs/requests.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.config.profile import SplitProfile
from trt_redknot.reports.arithmetic import attended_keys, head_cost, layer_cost
from trt_redknot.reports.report import Ledger, Ledgers
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import RowClass, Segment, SegmentKind
from trt_redknot.request.visibility import visible_entries

Epilogue = Literal["full", "active"]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Which rows run in one layer, bool [N] each: `all_heads` with every head, `global_heads` with the Global ones."""

    all_heads: Mask
    global_heads: Mask

    @property
    def running(self) -> Mask:
        return self.all_heads | self.global_heads


def rows_of_layer(profile: SplitProfile, plan: RowPlan, epilogue: Epilogue, layer: int) -> LayerRows:
    """The rows that run in `layer`. Omitted rows of an exact prefix run nowhere."""
    omitted = plan.classes == RowClass.OMITTED
    active = plan.classes == RowClass.ACTIVE
    if layer in profile.reusable:
        return LayerRows(all_heads=~omitted & ~active, global_heads=active)
    absent = omitted if layer >= profile.trailing_start and epilogue == "active" else _omitted_prefix(plan)
    return LayerRows(all_heads=~absent, global_heads=np.zeros_like(absent))


def adaptive_layers(geometry: ModelGeometry, profile: SplitProfile) -> tuple[int, ...]:
    """Layers whose fanout adapts: reusable ones with a learned router."""
    return tuple(layer for layer in profile.reusable if geometry.router_kinds[layer] is RouterKind.LEARNED)


def ledgers(
    geometry: ModelGeometry,
    profile: SplitProfile,
    plan: RowPlan,
    epilogue: Epilogue,
    k_histogram: Sequence[int] = (),
) -> Ledgers:
    """Everything that a request with this plan saves against recomputing all of its rows.

    Args:
        k_histogram: index k is the number of (row, layer) pairs of the :func:`adaptive_layers` that ran k experts;
            empty: every pair ran the native number.

    Raises:
        ValueError: the histogram does not count exactly the pairs that the plan runs.
    """
    return Ledgers(
        logical_head_rows=_logical_head_rows(geometry, profile, plan),
        token_rows=_token_rows(geometry, profile, plan, epilogue),
        arithmetic=_arithmetic(geometry, profile, plan, epilogue, k_histogram),
    )


def _logical_head_rows(geometry: ModelGeometry, profile: SplitProfile, plan: RowPlan) -> Ledger:
    local = geometry.heads - geometry.output_groups
    unprotected = plan.rows - plan.count(RowClass.PROTECTED)
    return Ledger(
        saved=len(profile.reusable) * local * unprotected,
        total=geometry.layers * geometry.heads * plan.rows,
    )


def _token_rows(geometry: ModelGeometry, profile: SplitProfile, plan: RowPlan, epilogue: Epilogue) -> Ledger:
    ran = sum(int(rows_of_layer(profile, plan, epilogue, layer).running.sum()) for layer in range(geometry.layers))
    total = geometry.layers * plan.rows
    return Ledger(saved=total - ran, total=total)


def _arithmetic(
    geometry: ModelGeometry, profile: SplitProfile, plan: RowPlan, epilogue: Epilogue, k_histogram: Sequence[int]
) -> Ledger:
    native = RowPlan(
        segments=(Segment(index=0, kind=SegmentKind.FRESH, start=0, length=plan.rows),),
        classes=np.full(plan.rows, RowClass.PROTECTED, dtype=np.uint8),
        protections=plan.protections,
    )
    total = _multiply_adds(geometry, profile, native, "full", ())
    executed = _multiply_adds(geometry, profile, plan, epilogue, k_histogram)
    # Partial windows of documents add entries that recomputation does not have: with nothing else saved, the executed
    # work may exceed the total by those few keys, which is a saving of nothing.
    return Ledger(saved=max(0, total - executed), total=total)


def _multiply_adds(
    geometry: ModelGeometry, profile: SplitProfile, plan: RowPlan, epilogue: Epilogue, k_histogram: Sequence[int]
) -> int:
    if plan.rows == 0:
        return 0
    adaptive = set(adaptive_layers(geometry, profile)) if len(k_histogram) else set()
    positions = np.arange(plan.rows)
    ratios = {0, geometry.csa_ratio, geometry.hca_ratio}
    visible = {ratio: visible_entries(plan.segments, positions, ratio) for ratio in ratios}
    executed = head_cost(geometry)
    adaptive_pairs = 0
    for layer in range(geometry.layers):
        cost = layer_cost(geometry, layer)
        ran = rows_of_layer(profile, plan, epilogue, layer)
        every, some = int(ran.all_heads.sum()), int(ran.global_heads.sum())
        keys = attended_keys(geometry, layer, visible[geometry.ratio(layer)])
        executed += cost.row * (every + some)
        executed += cost.head * (geometry.heads * every + geometry.output_groups * some)
        executed += cost.key * geometry.heads * int(keys[ran.all_heads].sum())
        executed += cost.key * geometry.output_groups * int(keys[ran.global_heads].sum())
        if geometry.attention_kinds[layer] is AttentionKind.CSA:
            executed += cost.scored * int(visible[geometry.csa_ratio][ran.running].sum())
        if layer in adaptive:
            adaptive_pairs += every + some
        else:
            executed += cost.expert * geometry.experts_per_token * (every + some)
    if len(k_histogram):
        counted = sum(k_histogram)
        if counted != adaptive_pairs:
            raise ValueError(f"k_histogram counts {counted} (row, layer) pairs, the plan runs {adaptive_pairs}")
        expert = layer_cost(geometry, 0).expert
        executed += expert * sum(k * count for k, count in enumerate(k_histogram))
    return executed


def _omitted_prefix(plan: RowPlan) -> Mask:
    absent = np.zeros(plan.rows, dtype=np.bool_)
    for segment in plan.segments:
        if segment.kind is SegmentKind.PREFIX:
            rows = slice(segment.start, segment.stop)
            absent[rows] = plan.classes[rows] == RowClass.OMITTED
    return absent
