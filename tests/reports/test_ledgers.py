"""The counted ledgers against brute force, released geometries and transformers' own weights."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.config.parse import geometry_from_config
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.reports.arithmetic import attended_keys, head_cost, layer_cost
from trt_redknot.reports.ledgers import adaptive_layers, ledgers, rows_of_layer
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import Protection, RowClass, Segment, SegmentKind
from trt_redknot.request.visibility import visible_entries

SMALL = DeepseekV4Config(
    vocab_size=128, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=9, num_attention_heads=8, head_dim=16,
    qk_rope_head_dim=8, q_lora_rank=24, num_experts_per_tok=6, n_routed_experts=8, sliding_window=16, o_groups=2,
    o_lora_rank=12, index_n_heads=4, index_head_dim=8, index_topk=6, hc_mult=4,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    layer_types=["sliding_attention", "sliding_attention"]
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 3 + ["compressed_sparse_attention"],
)  # fmt: skip
GEOMETRY = geometry_from_config(json.loads(SMALL.to_json_string()), source="SMALL")
PROFILE = SplitProfile.default(GEOMETRY)


@st.composite
def plans(draw: st.DrawFn, *, protected_only: bool = False, multiple: int = 1) -> RowPlan:
    """Requests of one to five segments, the last one fresh; classes in whole segments and at random.

    All lengths but the last are multiples of `multiple`.
    """
    lengths = [length * multiple for length in draw(st.lists(st.integers(1, 70 // multiple), max_size=4))]
    lengths.append(draw(st.integers(1, 70)))
    segments, start = [], 0
    for index, length in enumerate(lengths):
        last = index == len(lengths) - 1
        kinds = [SegmentKind.FRESH] if last else [SegmentKind.RELOCATED, SegmentKind.FRESH]
        if index == 0 and not last:
            kinds.append(SegmentKind.PREFIX)
        segments.append(Segment(index=index, kind=draw(st.sampled_from(kinds)), start=start, length=length))
        start += length
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    classes = np.zeros(start, dtype=np.uint8)
    if not protected_only:
        for segment in segments:
            rows = slice(segment.start, segment.stop)
            if segment.kind is SegmentKind.PREFIX:
                classes[rows] = RowClass.OMITTED
            elif segment.kind is SegmentKind.RELOCATED:
                classes[rows] = random.integers(0, 3, segment.length)
    protections = np.where(classes == RowClass.PROTECTED, Protection.NEW, 0).astype(np.uint8)
    return RowPlan(segments=tuple(segments), classes=classes, protections=protections)


def one_document(rows: int, row_class: RowClass) -> RowPlan:
    segment = Segment(index=0, kind=SegmentKind.RELOCATED, start=0, length=rows)
    return RowPlan(
        segments=(segment,),
        classes=np.full(rows, row_class, dtype=np.uint8),
        protections=np.zeros(rows, dtype=np.uint8),
    )


@pytest.mark.parametrize(("name", "reusable", "ceiling"), [("flash", 37, 0.7529), ("pro", 55, 0.7889)])
def test_ceiling_of_logical_head_rows(name: str, reusable: int, ceiling: float) -> None:
    geometry = released_geometry(name)
    profile = SplitProfile.default(geometry)
    assert len(profile.reusable) == reusable
    ledger = ledgers(geometry, profile, one_document(1024, RowClass.ACTIVE), "full").logical_head_rows
    assert round(ledger.share, 4) == ceiling


@given(plan=plans(), epilogue=st.sampled_from(["full", "active"]))
@settings(max_examples=60, deadline=None)
def test_shares_are_shares(plan: RowPlan, epilogue: str) -> None:
    result = ledgers(GEOMETRY, PROFILE, plan, epilogue)
    for ledger in (result.logical_head_rows, result.token_rows, result.arithmetic):
        assert 0.0 <= ledger.share < 1.0
    unprotected = plan.rows - plan.count(RowClass.PROTECTED)
    assert (result.logical_head_rows.saved > 0) == (unprotected > 0)
    assert (result.token_rows.saved > 0) == (plan.count(RowClass.OMITTED) > 0)


@given(plan=plans(protected_only=True, multiple=GEOMETRY.hca_ratio), epilogue=st.sampled_from(["full", "active"]))
@settings(max_examples=30, deadline=None)
def test_protecting_all_rows_of_whole_windows_saves_nothing(plan: RowPlan, epilogue: str) -> None:
    result = ledgers(GEOMETRY, PROFILE, plan, epilogue)
    assert (result.logical_head_rows.saved, result.token_rows.saved, result.arithmetic.saved) == (0, 0, 0)


@given(rows=st.integers(0, 300), epilogue=st.sampled_from(["full", "active"]))
@settings(max_examples=30, deadline=None)
def test_recompute_saves_nothing(rows: int, epilogue: str) -> None:
    segment = Segment(index=0, kind=SegmentKind.FRESH, start=0, length=rows)
    classes = np.full(rows, RowClass.PROTECTED, dtype=np.uint8)
    plan = RowPlan(segments=(segment,), classes=classes, protections=np.full(rows, Protection.NEW, dtype=np.uint8))
    result = ledgers(GEOMETRY, PROFILE, plan, epilogue)
    assert (result.logical_head_rows.saved, result.token_rows.saved, result.arithmetic.saved) == (0, 0, 0)


@given(plan=plans(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_savings_fall_as_rows_are_activated_and_protected(plan: RowPlan, seed: int) -> None:
    random = np.random.default_rng(seed)
    relocated = np.zeros(plan.rows, dtype=bool)
    for segment in plan.segments:
        relocated[segment.start : segment.stop] = segment.kind is SegmentKind.RELOCATED
    activated = np.where(relocated & (plan.classes == RowClass.OMITTED) & (random.random(plan.rows) < 0.5), 1, 0)
    more = dataclasses.replace(plan, classes=np.where(activated, RowClass.ACTIVE, plan.classes).astype(np.uint8))
    protect = (more.classes == RowClass.ACTIVE) & (random.random(plan.rows) < 0.5)
    most = dataclasses.replace(more, classes=np.where(protect, RowClass.PROTECTED, more.classes).astype(np.uint8))
    for less_work, more_work in ((plan, more), (more, most)):
        low, high = (ledgers(GEOMETRY, PROFILE, each, "full") for each in (less_work, more_work))
        assert high.arithmetic.saved <= low.arithmetic.saved
        assert high.token_rows.saved <= low.token_rows.saved
        assert high.logical_head_rows.saved <= low.logical_head_rows.saved
    if activated.any():
        gained = ledgers(GEOMETRY, PROFILE, plan, "full").arithmetic.saved
        assert ledgers(GEOMETRY, PROFILE, more, "full").arithmetic.saved < gained


@given(plan=plans())
@settings(max_examples=30, deadline=None)
def test_active_epilogue_saves_the_omitted_rows_of_the_trailing_fence(plan: RowPlan) -> None:
    full = ledgers(GEOMETRY, PROFILE, plan, "full")
    active = ledgers(GEOMETRY, PROFILE, plan, "active")
    relocated = plan.count(RowClass.OMITTED) - plan.prefix_rows
    trailing = GEOMETRY.layers - PROFILE.trailing_start
    assert active.token_rows.saved - full.token_rows.saved == relocated * trailing
    assert active.logical_head_rows == full.logical_head_rows


def test_omitted_prefix_runs_nowhere() -> None:
    segments = (
        Segment(index=0, kind=SegmentKind.PREFIX, start=0, length=32),
        Segment(index=1, kind=SegmentKind.FRESH, start=32, length=3),
    )
    classes = np.array([RowClass.OMITTED] * 32 + [RowClass.PROTECTED] * 3, dtype=np.uint8)
    plan = RowPlan(segments=segments, classes=classes, protections=np.zeros(35, dtype=np.uint8))
    for layer in range(GEOMETRY.layers):
        assert rows_of_layer(PROFILE, plan, "full", layer).running.tolist() == [False] * 32 + [True] * 3
    result = ledgers(GEOMETRY, PROFILE, plan, "full")
    assert result.token_rows.saved == 32 * GEOMETRY.layers


@given(plan=plans())
@settings(max_examples=40, deadline=None)
def test_visible_entries_against_windows(plan: RowPlan) -> None:
    for ratio in (4, 16):
        expected = []
        for row in range(plan.rows):
            count = 0
            for segment in plan.segments:
                for first in range(segment.start, segment.stop, ratio):
                    whole = first + ratio <= segment.stop
                    if whole:
                        count += first + ratio - 1 <= row
                    elif segment.kind is not SegmentKind.FRESH:
                        count += segment.stop <= row
            expected.append(count)
        assert visible_entries(plan.segments, np.arange(plan.rows), ratio).tolist() == expected
    assert visible_entries(plan.segments, np.arange(plan.rows), 0).tolist() == [0] * plan.rows


def brute_force(geometry: ModelGeometry, profile: SplitProfile, plan: RowPlan, epilogue: str) -> int:
    """Multiply-adds row by row and layer by layer, the row classes spelled out as in the table of docs/policy.md."""
    kind_of = {}
    for segment in plan.segments:
        kind_of.update(dict.fromkeys(range(segment.start, segment.stop), segment.kind))
    total = head_cost(geometry)
    for layer in range(geometry.layers):
        cost = layer_cost(geometry, layer)
        visible = visible_entries(plan.segments, np.arange(plan.rows), geometry.ratio(layer))
        keys = attended_keys(geometry, layer, visible)
        for row in range(plan.rows):
            row_class = RowClass(plan.classes[row])
            heads = geometry.heads
            if row_class is RowClass.OMITTED:
                prefix = kind_of[row] is SegmentKind.PREFIX
                if prefix or layer in profile.reusable or (layer >= profile.trailing_start and epilogue == "active"):
                    continue
            if row_class is RowClass.ACTIVE and layer in profile.reusable:
                heads = geometry.output_groups
            total += cost.row + heads * (cost.head + cost.key * int(keys[row]))
            total += cost.expert * geometry.experts_per_token
            total += cost.scored * int(visible[row])
    return total


@given(plan=plans(), epilogue=st.sampled_from(["full", "active"]))
@settings(max_examples=25, deadline=None)
def test_arithmetic_against_brute_force(plan: RowPlan, epilogue: str) -> None:
    ledger = ledgers(GEOMETRY, PROFILE, plan, epilogue).arithmetic
    native = RowPlan(
        segments=(Segment(index=0, kind=SegmentKind.FRESH, start=0, length=plan.rows),),
        classes=np.zeros(plan.rows, dtype=np.uint8),
        protections=plan.protections,
    )
    assert ledger.total == brute_force(GEOMETRY, PROFILE, native, "full")
    assert ledger.saved == max(0, ledger.total - brute_force(GEOMETRY, PROFILE, plan, epilogue))


@given(plan=plans(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_experts_left_out_are_counted_once_each(plan: RowPlan, seed: int) -> None:
    adaptive = adaptive_layers(GEOMETRY, PROFILE)
    live = plan.rows - plan.count(RowClass.OMITTED)
    ran = np.random.default_rng(seed).integers(3, 7, live * len(adaptive))
    histogram = np.bincount(ran, minlength=7).tolist()
    with_k = ledgers(GEOMETRY, PROFILE, plan, "active", histogram).arithmetic
    native = ledgers(GEOMETRY, PROFILE, plan, "active").arithmetic
    left_out = int((6 - ran).sum()) * layer_cost(GEOMETRY, 0).expert
    executed = brute_force(GEOMETRY, PROFILE, plan, "active") - left_out
    assert with_k.saved == max(0, native.total - executed)
    with pytest.raises(ValueError, match="k_histogram counts"):
        ledgers(GEOMETRY, PROFILE, plan, "active", [*histogram[:-1], histogram[-1] + 1])


def test_only_reusable_learned_layers_adapt() -> None:
    for name in ("flash", "pro"):
        geometry = released_geometry(name)
        layers = adaptive_layers(geometry, SplitProfile.default(geometry))
        assert layers == tuple(range(3, geometry.layers - 3))
        assert all(geometry.router_kinds[layer] is RouterKind.LEARNED for layer in layers)


@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
def test_factors_against_the_weights_of_transformers(layer: int) -> None:
    """Every projection of a row costs as many multiply-adds as its matrix has elements."""
    with torch.device("meta"):
        module = DeepseekV4ForCausalLM(SMALL).model.layers[layer]
    sizes = {name: tensor.numel() for name, tensor in module.named_parameters() if tensor.dim() >= 2}
    sizes = {name: size for name, size in sizes.items() if "position_bias" not in name}
    by_head = {"self_attn.q_b_proj.weight", "self_attn.o_a_proj.weight"}
    routed = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert by_head | routed <= set(sizes)
    cost = layer_cost(GEOMETRY, layer)
    assert cost.head * GEOMETRY.heads == sum(sizes[name] for name in by_head)
    assert cost.expert * GEOMETRY.experts == sum(sizes[name] for name in routed)
    # What is no matrix: collapse, expansion and 4 x 4 mix of the streams, around attention and around the experts.
    mixes = 2 * (2 + GEOMETRY.streams) * GEOMETRY.streams * GEOMETRY.hidden
    assert cost.row - mixes == sum(size for name, size in sizes.items() if name not in by_head | routed)
    csa = GEOMETRY.attention_kinds[layer] is AttentionKind.CSA
    assert cost.scored == (GEOMETRY.index_heads * GEOMETRY.index_dim if csa else 0)
