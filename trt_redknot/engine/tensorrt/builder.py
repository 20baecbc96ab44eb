"""Builds plans: one strongly typed network each, two optimization profiles, one timing cache for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trt_redknot.engine.tensorrt.emission import emit_plan
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, profile_ranges, shape_ranges
from trt_redknot.engine.tensorrt.progress import PlanProgress, make_monitor
from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.plugins import CutPort, PluginPort
from trt_redknot.ops.tensorrt.tensors import Shape

if TYPE_CHECKING:
    import tensorrt as trt

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class BuilderSettings:
    """How hard TensorRT looks for fast plans.

    Attributes:
        workspace_bytes: scratch memory that a plan may use.
        optimization_level: 0 (builds fast) to 5 (runs fast).
        timing_cache: file of measured tactics, read if it is there and written after the build; None: none.
    """

    workspace_bytes: int = 4 * _GIB
    optimization_level: int = 3
    timing_cache: Path | None = None


class PlanBuilder:
    """Builds the plans of one engine on one rank."""

    def __init__(self, platform: Platform, limits: PlanLimits, settings: BuilderSettings) -> None:
        self._platform = platform
        self._limits = limits
        self._settings = settings
        with platform.creating:
            self._builder = platform.module.Builder(platform.logger)
        self._cache: trt.ITimingCache | None = None

    def build(self, spec: PlanSpec, advance: Callable[[int], None] = lambda _: None) -> bytes:
        """The serialized plan.

        Args:
            advance: told of progress, STEPS_PER_PLAN steps in all.

        Raises:
            EngineError: as in `define`, or TensorRT cannot build the network.
        """
        network, port = self.define(spec)
        progress = PlanProgress(advance)
        config = self._configuration(spec, port)
        config.progress_monitor = make_monitor(self._platform.module, progress)
        plan = self._builder.build_serialized_network(network, config)
        if plan is None:
            raise EngineError(
                "TensorRT could not build a plan", found=spec.kind.name, remedy="The log above has TensorRT's reason."
            )
        progress.finish()
        return bytes(plan)

    def save_timing_cache(self) -> None:
        """Write the timing cache back to its file, if there is one."""
        path = self._settings.timing_cache
        if path is None or self._cache is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_bytes(bytes(self._cache.serialize()))
            partial.replace(path)
        except OSError as error:
            raise EngineError(f"the timing cache cannot be written: {error.strerror}", path=path) from error

    def define(self, spec: PlanSpec) -> tuple[trt.INetworkDefinition, PluginPort]:
        """The plan's network and the port that holds its plugins.

        Raises:
            EngineError: an op has no implementation here, a plugin is missing, or TensorRT refuses a layer.
        """
        module = self._platform.module
        # Implied on 11, needed on 10.
        flag = 1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._builder.create_network(flag)
        network.name = spec.kind.name
        port = self._platform.port()
        emit_plan(module, network, spec, port)
        return network, port

    def _configuration(self, spec: PlanSpec, port: PluginPort) -> trt.IBuilderConfig:
        config = self._builder.create_builder_config()
        config.builder_optimization_level = self._settings.optimization_level
        config.set_memory_pool_limit(self._platform.module.MemoryPoolType.WORKSPACE, self._settings.workspace_bytes)
        self._platform.configure(config)
        if self._settings.timing_cache is not None:
            if self._cache is None:
                self._cache = config.create_timing_cache(_read_cache(self._settings.timing_cache))
            config.set_timing_cache(self._cache, False)
        shapes: dict[str, Shape] = {tensor.name: tensor.shape for tensor in spec.inputs}
        if isinstance(port, CutPort):
            shapes |= {name: tensor.shape for name, tensor in port.added_inputs.items()}
        for phase in Phase:
            self._add_profile(config, spec, shapes, phase)
        return config

    def _add_profile(self, config: trt.IBuilderConfig, spec: PlanSpec, shapes: dict[str, Shape], phase: Phase) -> None:
        ranges = profile_ranges(spec.geometry, spec.kind.stage, self._limits, spec.world, phase)
        profile, dims = self._builder.create_optimization_profile(), self._platform.module.Dims
        for name, shape in shapes.items():
            found = shape_ranges(shape, ranges)
            if found is not None:
                least, common, most = (dims(list(sizes)) for sizes in found)
                profile.set_shape(name, least, common, most)
        if config.add_optimization_profile(profile) != list(Phase).index(phase):
            raise EngineError("TensorRT refused an optimization profile", found=f"{spec.kind.name}, {phase}")


def _read_cache(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise EngineError(f"the timing cache cannot be read: {error.strerror}", path=path) from error
