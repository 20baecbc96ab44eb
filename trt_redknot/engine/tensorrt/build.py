"""An engine of the tensorrt backend: weights by rank, plans that all ranks share, one engine.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import Collectives
from trt_redknot.collectives.agreement import agree
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BackendPart, BuildOptions, build_engine
from trt_redknot.engine.manifest import EngineManifest, PlanRecord
from trt_redknot.engine.tensorrt.builder import BuilderSettings, PlanBuilder
from trt_redknot.engine.tensorrt.memory import check_memory, memory_need
from trt_redknot.engine.tensorrt.native import Trial, Wanted, choose_collectives, try_native
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.progress import STEPS_PER_PLAN
from trt_redknot.engine.tensorrt.specification import PlanFormat, PlanSpec, plan_spec
from trt_redknot.engine.tensorrt.stages import plan_kinds
from trt_redknot.engine.weights import quantised
from trt_redknot.errors import EngineError, RedKnotError
from trt_redknot.partition import even_split

PLAN_FOLDER = "plans"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is built beside the weights.

    Attributes:
        format: of the caches; what moves rows is chosen by `collectives`.
    """

    limits: PlanLimits
    format: PlanFormat
    settings: BuilderSettings
    collectives: Wanted = "auto"


def plan_specs(geometry: ModelGeometry, *, world: int, format: PlanFormat) -> tuple[PlanSpec, ...]:
    """The plans of an engine, in order."""
    return tuple(plan_spec(geometry, kind, world=world, format=format) for kind in plan_kinds(geometry))


def plan_path(spec: PlanSpec) -> str:
    """Where the plan lies in the engine directory."""
    return f"{PLAN_FOLDER}/{spec.kind.name}.plan"


def plan_paths(geometry: ModelGeometry, world: int) -> tuple[str, ...]:
    """Of all plans of an engine, in the order of its manifest."""
    return tuple(plan_path(spec) for spec in plan_specs(geometry, world=world, format=PlanFormat()))


def progress_steps(geometry: ModelGeometry, size: int, rank: int) -> int:
    """Steps that this rank reports to `progress`: one for every layer, one for the rest, and those of its plans."""
    return geometry.layers + 1 + STEPS_PER_PLAN * len(even_split(len(plan_kinds(geometry)), size)[rank])


def build_tensorrt_engine(
    checkpoint: Checkpoint,
    profile: SplitProfile,
    output: Path,
    options: BuildOptions,
    plans: PlanOptions,
    collectives: Collectives,
    platform: Callable[[], Platform],
    *,
    trial: Trial = try_native,
    progress: Callable[[int], None] = lambda steps: None,
) -> EngineManifest:
    """Write the engine directory `output`. Collective: the plans are spread over the ranks, rank 0 publishes.

    Args:
        platform: finds this rank's platform; its refusal fails all ranks alike.
        trial: whether TensorRT's own collective layers work between the ranks.
        progress: told of every step on (:func:`progress_steps`).

    Raises:
        EngineError: a rank has no TensorRT, no GPU, too little memory or no plugin; the ranks differ in what they
            build with; a plan cannot be built; `output` exists. On all ranks, with nothing at `output`.
    """
    found: Platform | None = None
    error: RedKnotError | None = None
    specs: tuple[PlanSpec, ...] = ()
    try:
        _check_dtype(options)
        specs = plan_specs(checkpoint.geometry, world=collectives.size, format=plans.format)
        found = platform()
    except RedKnotError as refusal:
        error = refusal
    _check_same(agree(collectives, None if found is None else found.record(), error))
    assert found is not None
    chosen = choose_collectives(plans.collectives, found, collectives, trial)
    form = dataclasses.replace(plans.format, native_collectives=chosen == "native")
    try:
        specs = plan_specs(checkpoint.geometry, world=collectives.size, format=form)
        need = memory_need(specs, plans.limits, workspace_bytes=plans.settings.workspace_bytes)
        check_memory(need, found.free_bytes, found.gpu)
        # All of them are defined before the first is built: what is missing is found in seconds.
        builder = PlanBuilder(found, plans.limits, plans.settings)
        for spec in specs:
            builder.define(spec)
    except RedKnotError as refusal:
        error = refusal
    agree(collectives, None, error)
    mine = [specs[index] for index in even_split(len(specs), collectives.size)[collectives.rank]]

    def write(staging: Path) -> list[str]:
        return _write_plans(staging, builder, mine, progress)

    part = BackendPart(
        name="tensorrt", versions={"tensorrt": found.version}, gpu=found.gpu, plugin_build=found.plugin_build,
        write=write, convert=quantised, plans=PlanRecord(
            decode_rows=plans.limits.decode_rows, segments=plans.limits.segments,
            pool_tokens=plans.limits.pool_tokens, packed_cache=form.packed_cache,
            packed_local=form.packed_local, collectives=chosen,
        ),
    )  # fmt: skip
    return build_engine(checkpoint, profile, output, options, collectives, part, progress=lambda _: progress(1))


def _write_plans(
    staging: Path, builder: PlanBuilder, specs: list[PlanSpec], progress: Callable[[int], None]
) -> list[str]:
    (staging / PLAN_FOLDER).mkdir(exist_ok=True)
    written = []
    for spec in specs:
        (staging / plan_path(spec)).write_bytes(builder.build(spec, progress))
        written.append(plan_path(spec))
    builder.save_timing_cache()
    return written


def _check_dtype(options: BuildOptions) -> None:
    if options.dtype != "bfloat16":
        raise EngineError("the tensorrt backend computes in bfloat16", expected="--dtype bfloat16", found=options.dtype)


def _check_same(records: list[object]) -> None:
    different = sorted({str(record) for record in records})
    if len(different) > 1:
        raise EngineError(
            "the ranks would build different plans", expected=different[0], found=", ".join(different[1:]),
            remedy="Plans are the same on every rank: use the same TensorRT, GPU and plugin library on all of them.",
        )  # fmt: skip
