"""Row classes, budgets, whole windows: properties of the controller, over random requests and policies."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.request.controller import candidates, protect, select_rows
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import Protection, RowClass, Segment, SegmentKind

WINDOW = 4
BOUNDARY = 24


@st.composite
def segment_tables(draw: st.DrawFn) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    start = 0
    for index in range(draw(st.integers(1, 6))):
        fresh_before = bool(segments) and segments[-1].kind is SegmentKind.FRESH
        kinds = [SegmentKind.RELOCATED] if fresh_before else [SegmentKind.RELOCATED, SegmentKind.FRESH]
        kind = draw(st.sampled_from([*kinds, SegmentKind.PREFIX] if index == 0 else kinds))
        length = draw(st.integers(1, 400))
        edits = ()
        if kind is SegmentKind.RELOCATED:
            edits = tuple((p, 1) for p in sorted(draw(st.sets(st.integers(0, length - 1), max_size=3))))
        segments.append(Segment(index=index, kind=kind, start=start, length=length, edits=edits))
        start += length
    return tuple(segments)


policies = st.builds(
    ReusePolicy,
    budget=st.floats(0, 1),
    boundary=st.none() | st.integers(0, 200),
    tail=st.integers(0, 500),
    tail_share=st.floats(0, 1),
    protect=st.sampled_from(["default", "default", "all"]),
)


def plan_of(
    segments: tuple[Segment, ...], policy: ReusePolicy | None, seed: int, top_entries: int, live: bool = True
) -> tuple[RowPlan, np.ndarray, np.ndarray]:
    flags = protect(segments, policy, WINDOW, boundary=BOUNDARY)
    entries = sum(segment.entries(WINDOW) for segment in segments)
    scores = np.random.default_rng(seed).normal(size=entries)
    plan = select_rows(segments, flags, policy, window=WINDOW, scores=scores, live_scores=live, top_entries=top_entries)
    return plan, flags, scores


@given(segment_tables(), policies, st.integers(0, 2**31), st.integers(0, 50))
def test_classes_partition_the_rows(segments: tuple[Segment, ...], policy: ReusePolicy, seed: int, top: int) -> None:
    plan, flags, _ = plan_of(segments, policy, seed, top)
    counts = [plan.count(row_class) for row_class in RowClass]
    assert sum(counts) == plan.rows == segments[-1].stop
    assert ((plan.protections != 0) == (plan.classes == RowClass.PROTECTED)).all()
    # Nothing that was protected before the scores were known is given up for them.
    assert (plan.protections[flags != 0] & flags[flags != 0] == flags[flags != 0]).all()


@given(segment_tables(), policies, st.integers(0, 2**31), st.integers(0, 50))
def test_documents_are_cut_in_whole_windows(
    segments: tuple[Segment, ...], policy: ReusePolicy, seed: int, top: int
) -> None:
    plan, _, _ = plan_of(segments, policy, seed, top)
    for segment in segments:
        if segment.is_document:
            rows = plan.classes[segment.start : segment.stop]
            for start in range(0, segment.length, WINDOW):
                assert len(set(rows[start : start + WINDOW].tolist())) == 1


@given(segment_tables(), policies, st.integers(0, 2**31), st.integers(0, 50))
def test_the_budget_is_respected_and_used(
    segments: tuple[Segment, ...], policy: ReusePolicy, seed: int, top: int
) -> None:
    plan, flags, _ = plan_of(segments, policy, seed, top)
    windows = candidates(segments, flags, WINDOW)
    taken = min(top, len(windows.starts))
    assert len(set(np.flatnonzero(plan.protections & Protection.TOP_ENTRIES) // 1)) <= taken * WINDOW
    left = windows.rows - int(((plan.protections & Protection.TOP_ENTRIES) != 0).sum())
    active = plan.count(RowClass.ACTIVE)
    assert active <= policy.budget * left + 1e-6
    # The next window would not have fitted.
    assert active == left or active + WINDOW > policy.budget * left - 1e-6
    if policy.budget == 1.0:
        assert active == left


@given(segment_tables(), policies, st.integers(0, 2**31), st.integers(0, 50), st.booleans())
def test_best_scores_come_first(
    segments: tuple[Segment, ...], policy: ReusePolicy, seed: int, top: int, live: bool
) -> None:
    plan, flags, scores = plan_of(segments, policy, seed, top, live)
    windows = candidates(segments, flags, WINDOW)
    rank = {RowClass.PROTECTED: 0, RowClass.ACTIVE: 1, RowClass.OMITTED: 2}
    by_score = np.argsort(-scores[windows.entries], kind="stable")
    taken = [rank[RowClass(plan.classes[windows.starts[window]])] for window in by_score]
    assert taken == sorted(taken)
    protected = taken.count(0)
    assert protected == (min(top, len(taken)) if live else 0)


@given(segment_tables(), policies)
def test_what_must_be_protected_is(segments: tuple[Segment, ...], policy: ReusePolicy) -> None:
    flags = protect(segments, policy, WINDOW, boundary=BOUNDARY)
    total = segments[-1].stop
    tail = min(policy.tail, int(total * policy.tail_share))
    assert flags[-1] & Protection.QUERY
    for segment in segments:
        rows = flags[segment.start : segment.stop]
        if segment.kind is SegmentKind.FRESH:
            assert (rows & (Protection.QUERY | Protection.NEW)).all()
        if segment.kind is SegmentKind.RELOCATED:
            ends = BOUNDARY if policy.boundary is None else policy.boundary
            assert (rows[:ends] & Protection.BOUNDARY).all()
            assert (rows[max(0, segment.length - ends) :] & Protection.BOUNDARY).all()
            assert all(rows[position] & Protection.DIRTY for position, _ in segment.edits)
            reach = max(0, segment.stop - max(segment.start, total - tail))
            assert (rows[segment.length - reach :] & Protection.TAIL).all()
        if segment.kind is SegmentKind.PREFIX and policy.protect == "default":
            last = segment is segments[-1]
            assert (rows != 0).sum() == ((segment.length - 1) % WINDOW + 1 if last else 0)
    if policy.protect == "all":
        assert (flags != 0).all()


@given(segment_tables())
def test_the_recompute_arm_protects_every_row(segments: tuple[Segment, ...]) -> None:
    assert (protect(segments, None, WINDOW, boundary=BOUNDARY) == Protection.ALL).all()
