"""The row map and the layer map cover every row once, and say what the plan says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reports.scenes import fresh_plan, plan_of
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.reports.layermap import layer_bars, zone_spans
from trt_redknot.reports.rowmap import (
    CLASS_NAMES,
    MOST_CELLS,
    PARTS,
    class_codes,
    reason_counts,
    reason_words,
    row_map,
    segment_names,
)
from trt_redknot.request.segments import Protection, RowClass

LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=6)


@given(lengths=LENGTHS, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_runs_cover_every_row_once_with_its_class(lengths: list[int], seed: int) -> None:
    plan = plan_of(lengths, seed)
    drawn = row_map(plan)
    assert drawn.rows_per_cell == 1
    codes = class_codes(plan)
    covered = 0
    for run in drawn.runs:
        assert run.start == covered
        assert run.line == run.start // drawn.rows_per_line == (run.stop - 1) // drawn.rows_per_line
        assert run.start == run.line * drawn.rows_per_line + run.first_cell
        assert run.cells == run.stop - run.start
        assert set(codes[run.start : run.stop]) == {CLASS_NAMES.index(run.name)}
        assert run.parts[CLASS_NAMES.index(run.name)] == PARTS
        assert {reason_words(int(flags)) for flags in plan.protections[run.start : run.stop]} == {run.reasons}
        segment = plan.segments[run.segment]
        assert segment.start <= run.start < run.stop <= segment.stop
        covered = run.stop
    assert covered == plan.rows


@given(lengths=LENGTHS, seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_strips_name_each_segment_once_per_line(lengths: list[int], seed: int) -> None:
    plan = plan_of(lengths, seed)
    drawn = row_map(plan)
    for segment in plan.segments:
        strips = [strip for strip in drawn.strips if strip.segment == segment.index]
        assert [strip.begins for strip in strips] == [True] + [False] * (len(strips) - 1)
        assert sum(strip.cells for strip in strips) == segment.length
        assert len({strip.line for strip in strips}) == len(strips)


@given(rows=st.integers(MOST_CELLS + 1, 500_000), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_long_requests_share_cells_and_hide_no_class(rows: int, seed: int) -> None:
    plan = plan_of([rows // 3, rows // 2, rows - rows // 3 - rows // 2], seed)
    drawn = row_map(plan)
    assert drawn.rows_per_cell % 4 == 0
    assert drawn.lines * drawn.cells_per_line < MOST_CELLS * 1.2
    codes = class_codes(plan)
    covered = 0
    for run in drawn.runs:
        assert run.start == covered
        present = np.bincount(codes[run.start : run.stop], minlength=len(CLASS_NAMES)) > 0
        assert [part > 0 for part in run.parts] == present.tolist()
        assert sum(run.parts) == PARTS
        covered = run.stop
    assert covered == rows


def test_an_empty_request_has_an_empty_map() -> None:
    drawn = row_map(fresh_plan(0))
    assert (drawn.rows, drawn.lines, drawn.runs, drawn.strips) == (0, 0, (), ())


def test_reasons_are_counted_for_each_flag() -> None:
    plan = plan_of([100, 200, 50], 3)
    counts = reason_counts(plan)
    assert counts["query"] == int((plan.protections & Protection.QUERY != 0).sum())
    assert counts["recent tail"] == int((plan.protections & Protection.TAIL != 0).sum())
    assert "policy protects all" not in counts
    assert set(reason_words(int(Protection.DIRTY | Protection.ALL))) == {"edited token", "policy protects all"}


def test_names_must_fit_the_segments() -> None:
    plan = plan_of([10, 10, 5])
    assert segment_names(plan.segments, None) == ["artifact-000", "artifact-000", "fresh"]
    assert segment_names(plan.segments, ["a", "b", "c"]) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 names for 3 segments"):
        segment_names(plan.segments, ["a", "b"])


@pytest.mark.parametrize("epilogue", ["full", "active"])
def test_layer_bars_follow_the_table_of_row_classes(epilogue: str) -> None:
    geometry = released_geometry("flash")
    profile = SplitProfile.default(geometry)
    plan = plan_of([64, 300, 90, 20], 5)
    bars = layer_bars(geometry, profile, plan, epilogue)
    protected, active = plan.count(RowClass.PROTECTED), plan.count(RowClass.ACTIVE)
    for bar in bars:
        assert bar.all_heads + bar.global_heads + bar.absent == plan.rows
        if bar.zone == "reusable":
            assert (bar.all_heads, bar.global_heads) == (protected, active)
        elif bar.zone == "trailing fence" and epilogue == "active":
            assert (bar.all_heads, bar.global_heads) == (protected + active, 0)
        else:
            assert (bar.all_heads, bar.global_heads) == (plan.rows - plan.prefix_rows, 0)
    spans = [(span.zone, span.first, span.layers) for span in zone_spans(bars)]
    assert spans == [("leading fence", 0, 3), ("reusable", 3, 37), ("trailing fence", 40, 3)]
