"""Plans are opened only where they were built, and run only on tensors that fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.plans import cpu_platform, specs
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_file
from trt_redknot.engine.manifest import EngineFile, EngineManifest, EngineRank, geometry_to_json
from trt_redknot.engine.tensorrt.build import plan_path
from trt_redknot.engine.tensorrt.opening import check_io, open_plans
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase
from trt_redknot.engine.tensorrt.running import LoadedPlan, bind_sizes, empty_outputs
from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import Extent, Size, network_dims

SIZES = {extent: 3 + index for index, extent in enumerate(Extent)} | {Extent.ROWS: 9, Extent.RESTORED_ROWS: 2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int32": torch.int32,
          "int64": torch.int64}  # fmt: skip


def manifest_of(platform: Platform, directory: Path) -> EngineManifest:
    """An engine directory whose plans are files that no TensorRT takes."""
    (directory / "plans").mkdir(parents=True)
    files = []
    for spec in specs("nano", world=1):
        path = directory / plan_path(spec)
        path.write_bytes(b"no plan: " + spec.kind.name.encode())
        files.append(EngineFile(path=plan_path(spec), bytes=path.stat().st_size, digest=digest_file(path)))
    g = specs("nano")[0].geometry
    profile = SplitProfile.default(g)
    return EngineManifest(
        format_version=2, backend="tensorrt", geometry=geometry_to_json(g), geometry_digest=g.digest, profile=profile,
        profile_digest=profile.digest, checkpoint_fingerprint="of a checkpoint", dtype="bfloat16",
        artifact_format=ArtifactFormat.BFLOAT16, tp_size=1, max_length=64, chunk_rows=32,
        versions={"tensorrt": platform.version}, gpu=platform.gpu, plugin_build=platform.plugin_build,
        ranks=(EngineRank(rank=0, files=tuple(files)),), tokenizer_files=(),
    )  # fmt: skip


def refused(directory: Path, manifest: EngineManifest, platform: Platform) -> EngineError:
    (directory / "engine.json").write_bytes(manifest.encode())
    with pytest.raises(EngineError) as caught:
        open_plans(directory, platform)
    return caught.value


@pytest.mark.parametrize(
    ("what", "change", "values"),
    [
        ("TensorRT", {"versions": {"tensorrt": "10.0.0"}}, ("10.0.0", "version")),
        ("GPU", {"gpu": "NVIDIA H100"}, ("NVIDIA H100", "gpu")),
        ("plugin library", {"plugin_build": "0123"}, ("0123", "plugin_build")),
        ("backend", {"backend": "torch"}, ("torch", None)),
    ],
)
def test_another_machine_is_refused_with_both_values(
    platform: Platform, tmp_path: Path, what: str, change: dict[str, Any], values: tuple[str, str | None]
) -> None:
    manifest = manifest_of(platform, tmp_path).model_copy(update=change)
    never = dataclasses.replace(platform, module=SimpleNamespace(__version__=platform.version))  # type: ignore[arg-type]
    error = refused(tmp_path, manifest, never)
    assert error.problem == f"the engine was built with another {what}"
    assert error.expected == values[0]
    assert error.found == ("tensorrt" if values[1] is None else getattr(platform, values[1]))


def test_files_are_checked_before_tensorrt_sees_them(platform: Platform, tmp_path: Path) -> None:
    manifest = manifest_of(platform, tmp_path)
    never = dataclasses.replace(platform, module=SimpleNamespace(__version__=platform.version))  # type: ignore[arg-type]
    (tmp_path / "plans/mix-hash.plan").write_bytes(b"no plan: mix-hasH")
    assert "other content" in str(refused(tmp_path, manifest, never))
    (tmp_path / "plans/mix-hash.plan").unlink()
    assert "is missing" in str(refused(tmp_path, manifest, never))
    rank = manifest.ranks[0].model_copy(update={"files": manifest.ranks[0].files[1:]})
    error = refused(tmp_path, manifest.model_copy(update={"ranks": (rank,)}), never)
    assert error.expected == ["plans/embed.plan"]


def test_what_tensorrt_does_not_load_is_named(platform: Platform, tmp_path: Path) -> None:
    class Nothing:
        def __init__(self, logger: object) -> None:
            pass

        def deserialize_cuda_engine(self, plan: bytes) -> None:
            assert plan == b"no plan: embed"

    module: Any = SimpleNamespace(__version__=platform.version, Runtime=Nothing)
    error = refused(tmp_path, manifest_of(platform, tmp_path), dataclasses.replace(platform, module=module))
    assert "did not load a plan" in str(error)
    assert str(error.path).endswith("plans/embed.plan")


class FakeEngine:
    """Says what a plan's inputs and outputs are, and notes what is run."""

    def __init__(self, module: Any, spec: PlanSpec) -> None:
        tensors = [("INPUT", tensor) for tensor in spec.inputs] + [("OUTPUT", tensor) for tensor in spec.outputs]
        self.tensors = {
            tensor.name: (getattr(module.TensorIOMode, mode), tensor.type.of(module), list(network_dims(tensor.shape)))
            for mode, tensor in tensors
        }
        self.num_io_tensors = len(tensors)
        self.profiles: list[tuple[int, int]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.streams: list[int] = []
        self.largest = 2**40

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.tensors[name][0]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensors[name][1]

    def get_tensor_shape(self, name: str) -> Any:
        return self.tensors[name][2]

    def create_execution_context(self) -> FakeEngine:
        return self

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profiles.append((index, stream))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return max(shape) <= self.largest

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.streams.append(stream)
        return True


def attend() -> PlanSpec:
    return next(spec for spec in specs("nano") if spec.kind.name == "attend-csa")


def inputs(spec: PlanSpec) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.zeros(
            [SIZES[size.extent] * size.factor if isinstance(size, Size) else size for size in tensor.shape],
            dtype=DTYPES[tensor.type],
        )
        for tensor in spec.inputs
    }


@pytest.mark.parametrize("spec", specs("nano"), ids=lambda spec: spec.kind.name)
def test_inputs_and_outputs_of_a_plan_are_compared_with_the_specification(
    platform: Platform, tmp_path: Path, spec: PlanSpec
) -> None:
    engine: Any = FakeEngine(platform.module, spec)
    check_io(engine, spec, platform, tmp_path)
    name = spec.outputs[0].name
    engine.tensors[name][2][-1] += 8
    with pytest.raises(EngineError, match=f"tensor '{name}' of the plan is not as specified"):
        check_io(engine, spec, platform, tmp_path)


def test_a_plan_is_run_with_the_shapes_and_addresses_of_its_tensors(platform: Platform) -> None:
    spec = attend()
    engine: Any = FakeEngine(platform.module, spec)
    plan, tensors = LoadedPlan(spec, engine), inputs(spec)
    sizes = bind_sizes(spec, tensors)
    assert sizes[Extent.FULL_ROWS] == SIZES[Extent.ROWS] - SIZES[Extent.RESTORED_ROWS]
    outputs = empty_outputs(spec, sizes, torch.device("cpu"))
    assert outputs["local"].shape[0] == sizes[Extent.FULL_ROWS]
    for phase in (Phase.PREFILL, Phase.DECODE, Phase.DECODE):
        plan.run(phase, tensors, outputs, 77)
    assert engine.profiles == [(0, 77), (1, 77)]
    assert engine.streams == [77, 77, 77]
    assert engine.addresses == {name: tensor.data_ptr() for name, tensor in (tensors | outputs).items()}
    dynamic = {t.name for t in spec.inputs if any(isinstance(size, Size) for size in t.shape)}
    assert engine.shapes == {name: tuple(tensors[name].shape) for name in dynamic}
    engine.largest = 8
    with pytest.raises(EngineError, match=r"was not built for this size.*--chunk-rows"):
        plan.run(Phase.DECODE, tensors, outputs, 77)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("latents", lambda t: t.float()),
        ("latents", lambda t: t[:, :-1].contiguous()),
        ("latents", lambda t: t.T.contiguous().T),
        ("latents", lambda t: t[:0]),
        ("positions", lambda t: t[:-1]),
        ("attn.o_b", lambda t: t[None]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, spoil: Any) -> None:
    spec = attend()
    tensors = inputs(spec)
    tensors[name] = spoil(tensors[name])
    with pytest.raises(EngineError, match=f"tensor '{name}' does not fit plan 'attend-csa'"):
        bind_sizes(spec, tensors)
    del tensors[name]
    with pytest.raises(EngineError, match="lacks an input") as caught:
        bind_sizes(spec, tensors)
    assert caught.value.expected == name


def test_a_chunk_without_a_row_that_runs_all_heads_is_refused() -> None:
    spec = attend()
    tensors = inputs(spec)
    tensors["restored"] = tensors["restored"].new_zeros((SIZES[Extent.ROWS], tensors["restored"].shape[1]))
    with pytest.raises(EngineError, match="needs a row that runs all heads"):
        bind_sizes(spec, tensors)


def test_a_real_runtime_without_a_gpu_is_a_typed_error(rtx: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    platform = cpu_platform(rtx)
    manifest = manifest_of(platform, tmp_path)
    assert "did not load a plan" in str(refused(tmp_path, manifest, platform))
    assert json.loads((tmp_path / "engine.json").read_text())["backend"] == "tensorrt"
