"""Ranges of plans fit each other, and progress never lies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import WORLDS, geometry, specs
from trt_redknot.checkpoint.specs import layer_specs, shared_specs
from trt_redknot.engine.tensorrt.memory import check_memory, memory_need, plan_bytes
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, profile_ranges, shape_ranges
from trt_redknot.engine.tensorrt.progress import STEPS_PER_PLAN, PlanProgress
from trt_redknot.engine.tensorrt.stages import Stage
from trt_redknot.engine.weights import SCALE
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import Extent, Size

LIMITS = st.builds(
    PlanLimits,
    chunk_rows=st.integers(1, 20_000),
    max_length=st.integers(1, 2**21),
    decode_rows=st.integers(1, 512),
    segments=st.integers(1, 4096),
    pool_tokens=st.none() | st.integers(1, 2**21),
)


@given(limits=LIMITS, world=st.integers(1, 64), name=st.sampled_from(sorted(WORLDS)))
def test_ranges_are_ordered_never_empty_and_hold_what_the_limits_say(limits: PlanLimits, world: int, name: str) -> None:
    g = geometry(name)
    for phase in Phase:
        step = limits.chunk_rows if phase is Phase.PREFILL else limits.decode_rows
        for stage in Stage:
            ranges = profile_ranges(g, stage, limits, world, phase)
            assert ranges.keys() == set(Extent)
            assert all(1 <= least <= common <= most for least, common, most in ranges.values())
            assert ranges[Extent.OWN_ROWS].most * world >= step
        rows = profile_ranges(g, Stage.ATTEND, limits, world, phase)
        # A chunk always has a row of each class: the padding.
        assert rows[Extent.ROWS].most >= step + 2
        for full, restored in zip(rows[Extent.FULL_ROWS], rows[Extent.RESTORED_ROWS], strict=True):
            assert full + restored <= rows[Extent.ROWS].most + rows[Extent.RESTORED_ROWS].most - 1
        assert rows[Extent.FULL_ROWS].most + 1 == rows[Extent.RESTORED_ROWS].most + 1 == rows[Extent.ROWS].most
        common = [rows[extent].common for extent in (Extent.FULL_ROWS, Extent.RESTORED_ROWS, Extent.ROWS)]
        assert common[0] + common[1] == common[2]
        ratio = min(g.csa_ratio, g.hca_ratio)
        pool = limits.pool_tokens or limits.max_length
        assert rows[Extent.ENTRY_POOL].most >= pool // ratio + limits.segments
        assert rows[Extent.LATENT_POOL].most == pool
        assert rows[Extent.POSITIONS].most == limits.max_length


@pytest.mark.parametrize(("name", "value"), [("chunk_rows", 0), ("max_length", 0), ("max_length", 2**21 + 1)])
def test_limits_that_no_plan_can_index_are_refused(name: str, value: int) -> None:
    with pytest.raises(EngineError, match=rf"this {name}.*found {value}\. Choose another --{name.replace('_', '-')}"):
        PlanLimits(**{"chunk_rows": 4, "max_length": 4, name: value})


def test_a_shape_is_ranged_where_it_changes() -> None:
    ranges = profile_ranges(geometry("nano"), Stage.MIX, PlanLimits(chunk_rows=30, max_length=64), 2, Phase.PREFILL)
    assert shape_ranges((3, 4), ranges) is None
    assert shape_ranges((Size(extent=Extent.OWN_ROWS, factor=2), 5), ranges) == ((2, 5), (32, 5), (32, 5))


@pytest.mark.parametrize("name", WORLDS)
def test_weights_of_plans_are_a_rank_s_part_of_the_checkpoint(name: str) -> None:
    g, world = geometry(name), WORLDS[name]
    found = 0
    for spec in specs(name):
        names = {tensor.name for tensor in spec.inputs}
        for tensor in spec.inputs:
            # Scales are made by the build.
            if not tensor.weight or (tensor.name.endswith(SCALE) and tensor.name.removesuffix(SCALE) in names):
                continue
            sizes = [len(range(0, g.vocab, world)) if isinstance(size, Size) else size for size in tensor.shape]
            found += math.prod(sizes) * max(1, len(spec.kind.layers(g)))
    wanted = [*shared_specs(g), *(spec for layer in range(g.layers) for spec in layer_specs(g, layer))]
    assert found == sum(math.prod(spec.local_shape(0, world)) for spec in wanted)


def test_memory_is_refused_by_the_byte() -> None:
    limits, plans = PlanLimits(chunk_rows=4096, max_length=2**18), specs("flash")
    need = memory_need(plans, limits, workspace_bytes=2**30)
    assert need.building == max(plan_bytes(spec, limits) for spec in plans) + 2**30
    # FP8 experts: 43 layers of 32 experts with three matrices of 4096 x 2048 are the bulk of a rank's weights.
    experts = 43 * 32 * 3 * 4096 * 2048
    assert experts < need.weights < 2 * experts
    most = max(need.weights, need.building)
    check_memory(need, most, "H200")
    with pytest.raises(EngineError, match=rf"at least {most:,} bytes, found {most - 1:,} bytes free on H200"):
        check_memory(need, most - 1, "H200")


@given(st.lists(st.tuples(st.sampled_from("srf"), st.sampled_from("abc"), st.integers(0, 9)), max_size=60))
def test_progress_moves_forward_and_ends_at_the_whole(events: list[tuple[str, str, int]]) -> None:
    steps: list[int] = []
    progress = PlanProgress(steps.append)
    for kind, phase, number in events:
        if kind == "s":
            progress.start(phase, None if phase == "a" else chr(ord(phase) - 1), number)
        elif kind == "r":
            progress.step(phase, number)
        else:
            progress.finish_phase(phase)
        assert sum(steps) <= STEPS_PER_PLAN
    progress.finish()
    assert sum(steps) == STEPS_PER_PLAN
    assert all(step > 0 for step in steps)


def test_steps_of_the_outermost_phase_move_the_bar_by_their_share() -> None:
    steps: list[int] = []
    progress = PlanProgress(steps.append)
    progress.start("build", None, 4)
    progress.step("build", 0)
    progress.start("tactics", "build", 5)
    progress.step("tactics", 1)
    progress.finish_phase("tactics")
    progress.step("build", 1)
    assert steps == [25, 10, 15]
