"""Sweeps: each axis changes one thing."""

from __future__ import annotations

import pytest

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.evaluation.prompts import Cutting
from trt_redknot.evaluation.variants import AXES, joined, sweep

BASE = ReusePolicy(budget=0.15, boundary=8, tail=64, top_entries=4, tau=0.9, epilogue="active")
CHANGED = {
    "budget": {"budget"},
    "protected": {"boundary", "top_entries", "tail"},
    "epilogue": {"epilogue"},
    "tau": {"tau"},
    "fanout": {"tau", "protect"},
    "documents": set(),
    "order": set(),
    "alignment": set(),
    "engine": set(),
}


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_changes_nothing_else(axis: str) -> None:
    variants = sweep(BASE, [axis], multiple=32, engines=["fp8", "heads"])
    assert len({variant.name for variant in variants}) == len(variants) >= 2
    for variant in variants:
        assert variant.axis == axis
        differing = {key for key, value in variant.policy.model_dump().items() if value != getattr(BASE, key)}
        assert differing <= CHANGED[axis]
        assert variant.engine == "base" or axis == "engine"
        assert variant.cutting == Cutting() or axis in ("documents", "order", "alignment", "fanout")


def test_contexts_are_joined_where_a_variant_does_not_say_how_many_documents_it_has() -> None:
    variants = sweep(BASE, AXES, multiple=32)
    assert joined(variants, None) == variants
    for variant, kept in zip(joined(variants, 3), variants, strict=True):
        assert variant.cutting.documents == (kept.cutting.documents or 3)
        assert variant.cutting.multiple == kept.cutting.multiple
        assert variant.policy == kept.policy


def test_the_issues_points_are_there() -> None:
    by_axis = {axis: sweep(BASE, [axis], multiple=32, engines=["fp8"]) for axis in AXES}
    assert [v.policy.budget for v in by_axis["budget"]] == [0.0, 0.10, 0.20, 0.25, 0.50, 1.0]
    taus = [v.policy.tau for v in by_axis["tau"]]
    assert (min(taus), max(taus)) == (0.5, 1.0)  # type: ignore[type-var]
    off = [{key for key in ("boundary", "top_entries", "tail") if not getattr(v.policy, key)}
           for v in by_axis["protected"]]  # fmt: skip
    assert off == [set(), {"boundary"}, {"top_entries"}, {"tail"}, {"boundary", "top_entries", "tail"}]
    assert {v.policy.epilogue for v in by_axis["epilogue"]} == {"full", "active"}
    assert {v.policy.protect for v in by_axis["fanout"]} == {"all"}
    assert {v.cutting.multiple for v in by_axis["fanout"]} == {32}
    assert [v.cutting.multiple for v in by_axis["alignment"]] == [None, 32]
    assert {v.cutting.order for v in by_axis["order"]} == {"given", "reversed", "shuffled"}
    assert [v.engine for v in by_axis["engine"]] == ["base", "fp8"]
    everything = sweep(BASE, AXES, multiple=32)
    assert len({v.name for v in everything}) == len(everything)
