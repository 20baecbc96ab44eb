"""Opening the plans of an engine directory: everything engine.json says is compared before a plan is deserialised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trt_redknot.engine.manifest import MANIFEST, EngineManifest, check_files, read_manifest
from trt_redknot.engine.tensorrt.build import plan_path, plan_specs
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, shape_ranges
from trt_redknot.engine.tensorrt.running import LoadedPlan, plan_ranges
from trt_redknot.engine.tensorrt.specification import PlanFormat, PlanSpec
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import network_dims

if TYPE_CHECKING:
    import tensorrt as trt

_REBUILD = "Plans run only where they were built: build the engine on this machine with build_engine.py."


@dataclass(frozen=True, kw_only=True)
class OpenedPlans:
    """The plans of an engine, deserialised.

    Attributes:
        plans: by name.
        limits: that they were built with.
    """

    platform: Platform
    plans: Mapping[str, LoadedPlan]
    limits: PlanLimits

    @property
    def specs(self) -> tuple[PlanSpec, ...]:
        return tuple(plan.spec for plan in self.plans.values())


def open_plans(directory: Path, platform: Platform, *, verify: bool = True) -> OpenedPlans:
    """The plans of an engine.

    Args:
        verify: compare the content of the plan files with the manifest (sizes are always compared).

    Raises:
        EngineError: another backend, TensorRT, GPU or plugin build than this platform's, with both values; a file that
            is missing or altered; a plan that TensorRT refuses, or whose inputs, outputs or profiles are not the
            specified ones.
    """
    manifest, geometry = read_manifest(directory)
    check_platform(manifest, platform, directory / MANIFEST)
    record = manifest.plans
    if record is None:
        raise EngineError("manifest key 'plans' is missing", path=directory / MANIFEST, remedy=_REBUILD)
    form = PlanFormat(
        packed_cache=record.packed_cache, packed_local=record.packed_local,
        native_collectives=record.collectives == "native",
    )  # fmt: skip
    limits = PlanLimits(
        chunk_rows=manifest.chunk_rows, max_length=manifest.max_length, decode_rows=record.decode_rows,
        segments=record.segments, pool_tokens=record.pool_tokens,
    )  # fmt: skip
    specs = plan_specs(geometry, world=manifest.tp_size, format=form)
    wanted = {plan_path(spec) for spec in specs}
    files = tuple(file for file in manifest.ranks[0].files if file.path in wanted)
    if len(files) != len(specs):
        missing = sorted(wanted - {file.path for file in files})
        raise EngineError(
            "the manifest lacks plans of its geometry", expected=missing, path=directory / MANIFEST, remedy=_REBUILD
        )
    check_files(directory, files, digests=verify)
    runtime = platform.module.Runtime(platform.logger)
    plans = {spec.kind.name: _load(runtime, directory / plan_path(spec), spec, limits, platform) for spec in specs}
    return OpenedPlans(platform=platform, plans=plans, limits=limits)


def check_platform(manifest: EngineManifest, platform: Platform, path: Path) -> None:
    """Raise EngineError for the first thing in which the machine is not the one that the engine was built on."""
    for what, stated, found in (
        ("backend", manifest.backend, "tensorrt"),
        ("TensorRT", manifest.versions.get("tensorrt"), platform.version),
        ("GPU", manifest.gpu, platform.gpu),
        ("plugin library", manifest.plugin_build, platform.plugin_build),
    ):
        if stated != found:
            raise EngineError(
                f"the engine was built with another {what}", expected=stated, found=found, path=path, remedy=_REBUILD
            )


def check_io(engine: trt.ICudaEngine, spec: PlanSpec, platform: Platform, path: Path) -> None:
    """Raise EngineError unless the inputs and outputs of a plan are those of its specification."""
    mode = platform.module.TensorIOMode
    found: dict[str, tuple[str, trt.DataType, tuple[int, ...]]] = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        direction = "input" if engine.get_tensor_mode(name) == mode.INPUT else "output"
        found[name] = (direction, engine.get_tensor_dtype(name), _sizes(engine.get_tensor_shape(name)))
    wanted = {
        tensor.name: (direction, tensor.type.of(platform.module), network_dims(tensor.shape))
        for direction, tensors in (("input", spec.inputs), ("output", spec.outputs))
        for tensor in tensors
    }
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise EngineError(
                f"tensor {name!r} of the plan is not as specified", expected=wanted.get(name), found=found.get(name),
                path=path, remedy=_REBUILD,
            )  # fmt: skip


def check_profiles(engine: trt.ICudaEngine, spec: PlanSpec, limits: PlanLimits, path: Path) -> None:
    """Raise EngineError unless the optimization profiles of a plan are those of the limits."""
    if engine.num_optimization_profiles != len(Phase):
        raise EngineError(
            "the plan has another number of optimization profiles", expected=len(Phase),
            found=engine.num_optimization_profiles, path=path, remedy=_REBUILD,
        )  # fmt: skip
    for index, (phase, ranges) in enumerate(plan_ranges(spec, limits).items()):
        for tensor in spec.inputs:
            wanted = shape_ranges(tensor.shape, ranges)
            if wanted is None:
                continue
            found = tuple(_sizes(dims) for dims in engine.get_tensor_profile_shape(tensor.name, index))
            if found != wanted:
                raise EngineError(
                    f"tensor {tensor.name!r} of the plan has another range for {phase}", expected=wanted, found=found,
                    path=path, remedy=_REBUILD,
                )  # fmt: skip


def _sizes(dims: trt.Dims) -> tuple[int, ...]:
    return tuple(dims[axis] for axis in range(len(dims)))


def _load(runtime: trt.Runtime, path: Path, spec: PlanSpec, limits: PlanLimits, platform: Platform) -> LoadedPlan:
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise EngineError(
            "TensorRT did not load a plan", path=path, remedy=f"The log above has TensorRT's reason. {_REBUILD}"
        )
    check_io(engine, spec, platform, path)
    check_profiles(engine, spec, limits, path)
    return LoadedPlan(spec, engine)
