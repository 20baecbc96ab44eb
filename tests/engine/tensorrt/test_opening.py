"""Plans are opened only where they were built, and run only on tensors that fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_tensorrt import Engine as FakeEngine
from tests.support.fake_tensorrt import Journal, fake_module
from tests.support.plans import cpu_platform, specs
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_file
from trt_redknot.engine.manifest import EngineFile, EngineManifest, EngineRank, PlanRecord, geometry_to_json
from trt_redknot.engine.tensorrt.build import plan_path
from trt_redknot.engine.tensorrt.opening import check_io, check_profiles, open_plans
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.running import bind_sizes
from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import Extent, Size

RECORD = PlanRecord(
    decode_rows=2, segments=9, pool_tokens=None, packed_cache=False, packed_local=False, collectives="none"
)
LIMITS = PlanLimits(chunk_rows=32, max_length=64, decode_rows=2, segments=9)
SIZES = {extent: 3 + index for index, extent in enumerate(Extent)} | {Extent.ROWS: 9, Extent.RESTORED_ROWS: 2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int32": torch.int32,
          "int64": torch.int64}  # fmt: skip


def manifest_of(
    platform: Platform, directory: Path, content: Callable[[PlanSpec], str] = lambda spec: f"no plan: {spec.kind.name}"
) -> EngineManifest:
    """An engine directory whose plans are files that no TensorRT takes, if nothing else is said."""
    (directory / "plans").mkdir(parents=True)
    files = []
    for spec in specs("nano", world=1):
        path = directory / plan_path(spec)
        path.write_text(content(spec))
        files.append(EngineFile(path=plan_path(spec), bytes=path.stat().st_size, digest=digest_file(path)))
    g = specs("nano")[0].geometry
    profile = SplitProfile.default(g)
    return EngineManifest(
        format_version=2, backend="tensorrt", geometry=geometry_to_json(g), geometry_digest=g.digest, profile=profile,
        profile_digest=profile.digest, checkpoint_fingerprint="of a checkpoint", dtype="bfloat16",
        experts="fp8", artifact_format=ArtifactFormat.BFLOAT16, tp_size=1, max_length=64, chunk_rows=32,
        versions={"tensorrt": platform.version}, gpu=platform.gpu, plugin_build=platform.plugin_build, plans=RECORD,
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


def fake_engine(spec: PlanSpec, limits: PlanLimits = LIMITS) -> Any:
    """An engine of the fake TensorRT, and a platform that opens it."""
    return FakeEngine(spec, limits, lambda plan, inputs: {}, Journal())


@pytest.mark.parametrize("spec", specs("nano"), ids=lambda spec: spec.kind.name)
def test_inputs_and_outputs_of_a_plan_are_compared_with_the_specification(
    platform: Platform, tmp_path: Path, spec: PlanSpec
) -> None:
    module = fake_module((spec,), LIMITS, lambda plan, inputs: {}, Journal())
    fake = dataclasses.replace(platform, module=module)
    engine = fake_engine(spec)
    check_io(engine, spec, fake, tmp_path)
    output = spec.outputs[0]
    last = output.shape[-1]
    wrong = Size(extent=Extent.SEGMENTS) if isinstance(last, int) else 7
    engine.tensors[output.name] = dataclasses.replace(output, shape=(*output.shape[:-1], wrong))
    with pytest.raises(EngineError, match=f"tensor '{output.name}' of the plan is not as specified"):
        check_io(engine, spec, fake, tmp_path)


@pytest.mark.parametrize("spec", specs("nano"), ids=lambda spec: spec.kind.name)
def test_profiles_of_a_plan_are_compared_with_the_limits(tmp_path: Path, spec: PlanSpec) -> None:
    check_profiles(fake_engine(spec), spec, LIMITS, tmp_path)
    wider = dataclasses.replace(LIMITS, chunk_rows=64, decode_rows=128, max_length=4096)
    with pytest.raises(EngineError, match="of the plan has another range for prefill"):
        check_profiles(fake_engine(spec), spec, wider, tmp_path)
    engine = fake_engine(spec)
    engine.num_optimization_profiles = 1
    with pytest.raises(EngineError, match="another number of optimization profiles, expected 2, found 1"):
        check_profiles(engine, spec, LIMITS, tmp_path)


def test_a_sound_engine_opens_with_the_limits_of_its_manifest(platform: Platform, tmp_path: Path) -> None:
    plans = specs("nano", world=1)
    fake = dataclasses.replace(platform, module=fake_module(plans, LIMITS, lambda plan, inputs: {}, Journal()))
    manifest = manifest_of(fake, tmp_path, content=lambda spec: spec.kind.name)
    (tmp_path / "engine.json").write_bytes(manifest.encode())
    opened = open_plans(tmp_path, fake)
    assert opened.specs == plans
    assert opened.limits == LIMITS
    (tmp_path / "engine.json").write_bytes(manifest.model_copy(update={"plans": None}).encode())
    with pytest.raises(EngineError, match="manifest key 'plans' is missing"):
        open_plans(tmp_path, fake)


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
