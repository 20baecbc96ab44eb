"""Engines of the tensorrt backend: what is written, what is refused and how, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.artifacts.support import together
from tests.support.plans import cpu_platform, specs, write_nano
from trt_redknot import Engine
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BuildOptions
from trt_redknot.engine.manifest import check_files, read_manifest
from trt_redknot.engine.tensorrt.build import PlanOptions, build_tensorrt_engine, progress_steps
from trt_redknot.engine.tensorrt.builder import BuilderSettings, PlanBuilder
from trt_redknot.engine.tensorrt.platform import Platform, find_platform, find_tensorrt
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.specification import PlanFormat
from trt_redknot.engine.weights import SCALE
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.plugins import RegistryPort
from trt_redknot.ops.tensorrt.tensors import ElementType, Size

TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.int32: ElementType.INT32,
    torch.float8_e4m3fn: ElementType.INT8,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nano(tmp_path_factory.mktemp("nano") / "checkpoint")


def build(
    checkpoint: Path, output: Path, platform: Callable[[], Platform], *, dtype: Any = "bfloat16",
    workspace: int = 2**32, progress: Callable[[int], None] = lambda steps: None,
    ranks: Collectives | None = None,
) -> None:  # fmt: skip
    geometry = load_geometry(checkpoint)
    options = BuildOptions(dtype=dtype, artifact_format=ArtifactFormat.BFLOAT16, max_length=2048, chunk_rows=256)
    plans = PlanOptions(
        limits=PlanLimits(chunk_rows=256, max_length=2048), format=PlanFormat(),
        settings=BuilderSettings(optimization_level=0, workspace_bytes=workspace),
    )  # fmt: skip
    build_tensorrt_engine(
        Checkpoint.open(checkpoint, geometry), SplitProfile.default(geometry), output, options, plans,
        ranks or LocalCollectives(), platform, progress=progress,
    )  # fmt: skip


def refused(checkpoint: Path, folder: Path, platform: Callable[[], Platform], **options: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        build(checkpoint, folder / "engine", platform, **options)
    assert list(folder.iterdir()) == []
    return caught.value


@pytest.fixture(scope="module")
def engine(platform: Platform, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine directory, alone in its folder."""
    steps: list[int] = []
    output = tmp_path_factory.mktemp("engines") / "engine"
    build(checkpoint, output, lambda: platform, progress=steps.append)
    assert sum(steps) == progress_steps(load_geometry(checkpoint), 1, 0)
    return output


def test_an_engine_is_weights_plans_and_one_manifest(platform: Platform, engine: Path) -> None:
    output = engine
    manifest, geometry = read_manifest(output)
    assert (manifest.backend, manifest.dtype) == ("tensorrt", "bfloat16")
    assert (manifest.gpu, manifest.plugin_build) == (platform.gpu, platform.plugin_build)
    assert manifest.versions["tensorrt"] == platform.version
    check_files(output, manifest.ranks[0].files, digests=True)
    listed = [file.path for file in manifest.ranks[0].files]
    plans = specs("nano", world=1)
    assert listed[-len(plans) :] == [f"plans/{spec.kind.name}.plan" for spec in plans]
    assert sorted(path.name for path in (output / "plans").iterdir()) == sorted(Path(p).name for p in listed[-13:])
    assert {path.name for path in output.parent.iterdir()} == {"engine"}

    # What a plan takes as weights is what lies in the files, by name, type and shape.
    for layer in range(geometry.layers):
        stored = load_file(output / f"rank-0000/layer-{layer:04d}.safetensors")
        found = {name: (TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in stored.items()}
        mine = [tensor for spec in plans if layer in spec.kind.layers(geometry) for tensor in spec.inputs]
        assert found == {tensor.name: (tensor.type, tensor.shape) for tensor in mine if tensor.weight}
    shared = load_file(output / "rank-0000/shared.safetensors")
    wanted = [tensor for spec in plans if not spec.kind.layers(geometry) for tensor in spec.inputs if tensor.weight]
    assert {tensor.name for tensor in wanted} == shared.keys()
    for tensor in wanted:
        sizes = tuple(geometry.vocab if isinstance(size, Size) else size for size in tensor.shape)
        assert sizes == tuple(shared[tensor.name].shape)


def test_expert_weights_are_the_checkpoint_s_within_half_a_step(checkpoint: Path, engine: Path) -> None:
    geometry = load_geometry(checkpoint)
    stored = load_file(engine / "rank-0000/layer-0003.safetensors")
    exact = Checkpoint.open(checkpoint, geometry).load_layer(3, 0, 1, torch.bfloat16)
    for name in ("experts.gate_up", "experts.down"):
        scales = stored[name + SCALE].transpose(1, 2)
        spread = scales.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
        error = (stored[name].float() * spread - exact[name].float()).abs()
        # e4m3: 3 bits of mantissa, and the least step of its subnormal numbers.
        assert bool((error <= (exact[name].float().abs() / 16).clamp(min=0) + spread * 2.0**-10).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_engine_is_refused_before_it_loads_anything(engine: Path, tmp_path: Path) -> None:
    output = shutil.copytree(engine, tmp_path / "engine")
    for device in (None, "cpu"):
        with pytest.raises(EngineError, match=r"the engine's plans run on a GPU.*--backend torch") as caught:
            Engine.open(output, device=device)
        assert caught.value.found == "cpu"
    text = json.loads((output / "engine.json").read_text())
    text["gpu"] = "another"
    (output / "engine.json").write_text(json.dumps(text))
    with pytest.raises(EngineError, match="manifest key 'digest' contradicts"):
        read_manifest(output)


# TensorRT for RTX says that its own timing cache does nothing.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_timing_cache_is_written_and_read_again(platform: Platform, tmp_path: Path) -> None:
    settings = BuilderSettings(optimization_level=0, timing_cache=tmp_path / "caches" / "timing")
    spec = specs("nano")[0]
    for _ in range(2):
        builder = PlanBuilder(platform, PlanLimits(chunk_rows=256, max_length=2048), settings)
        builder.build(spec)
        builder.save_timing_cache()
        assert [path.name for path in (tmp_path / "caches").iterdir()] == ["timing"]
    (tmp_path / "caches" / "timing").unlink()
    (tmp_path / "caches" / "timing").mkdir()
    with pytest.raises(EngineError, match=r"timing cache cannot be read.*caches/timing"):
        PlanBuilder(platform, PlanLimits(chunk_rows=256, max_length=2048), settings).build(spec)


def test_a_plugin_that_the_registry_lacks_is_named(rtx: Any, checkpoint: Path, tmp_path: Path) -> None:
    registry: Any = SimpleNamespace(get_creator=lambda *names: None)
    platform = dataclasses.replace(cpu_platform(rtx), port=lambda: RegistryPort(registry))
    error = refused(checkpoint, tmp_path, lambda: platform)
    assert "op 'hyper_connection_pre' has no implementation" in str(error)
    assert error.expected == "redknot::HyperConnectionPre version 1"


def test_a_plugin_that_refuses_its_fields_is_named(rtx: Any, checkpoint: Path, tmp_path: Path) -> None:
    creator = SimpleNamespace(create_plugin=lambda *given: None)
    registry: Any = SimpleNamespace(get_creator=lambda *names: creator)
    platform = dataclasses.replace(cpu_platform(rtx), port=lambda: RegistryPort(registry))
    error = refused(checkpoint, tmp_path, lambda: platform)
    assert error.expected == "HyperConnectionPre"
    assert "'hidden': 256" in str(error.found)


def test_too_little_memory_is_refused_before_anything_is_built(
    platform: Platform, checkpoint: Path, tmp_path: Path
) -> None:
    error = refused(checkpoint, tmp_path, lambda: dataclasses.replace(platform, free_bytes=2**20))
    assert "too little free memory" in str(error)
    assert "1,048,576 bytes free" in str(error)


def test_other_dtypes_are_refused(platform: Platform, checkpoint: Path, tmp_path: Path) -> None:
    assert "bfloat16" in str(refused(checkpoint, tmp_path, lambda: platform, dtype="float32").expected)


def test_a_plan_that_tensorrt_cannot_build_leaves_nothing(platform: Platform, checkpoint: Path, tmp_path: Path) -> None:
    # No tactic of any plan is content with so little.
    error = refused(checkpoint, tmp_path, lambda: platform, workspace=1)
    assert "could not build a plan" in str(error)


def test_an_existing_output_is_refused(platform: Platform, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with pytest.raises(EngineError, match="exists already"):
        build(checkpoint, tmp_path / "engine", lambda: platform)
    assert list((tmp_path / "engine").iterdir()) == []


def test_without_tensorrt_the_remedy_is_named() -> None:
    with pytest.raises(EngineError, match="TensorRT is not installed") as caught:
        find_tensorrt("no_such_tensorrt")
    assert "--backend torch" in (caught.value.remedy or "")


def test_a_module_without_a_builder_is_no_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stubs_only").mkdir()
    (tmp_path / "old_tensorrt.py").write_text("__version__ = '8.6.1'\nBuilder = object\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match="has no builder"):
        find_tensorrt("stubs_only")
    with pytest.raises(EngineError, match=r"too old, expected 10 or newer, found 8\.6\.1"):
        find_tensorrt("old_tensorrt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_built(rtx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trt_redknot.engine.tensorrt.platform.find_tensorrt", lambda: rtx)
    with pytest.raises(EngineError, match="on a GPU and there is none"):
        find_platform(0)


def test_one_rank_s_refusal_fails_all_before_anything_is_written(
    platform: Platform, checkpoint: Path, tmp_path: Path
) -> None:
    def work(ranks: Collectives) -> None:
        def find() -> Platform:
            if ranks.rank == 1:
                raise EngineError("TensorRT is not installed")
            return platform

        build(checkpoint, tmp_path / "engine", find, ranks=ranks)

    outcomes = together(2, work)
    assert all("rank 1: TensorRT is not installed" in str(outcome) for outcome in outcomes), outcomes
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_would_build_different_plans_are_refused(
    platform: Platform, checkpoint: Path, tmp_path: Path
) -> None:
    def work(ranks: Collectives) -> None:
        mine = dataclasses.replace(platform, gpu=f"GPU of rank {ranks.rank}")
        build(checkpoint, tmp_path / "engine", lambda: mine, ranks=ranks)

    for outcome in together(2, work):
        assert isinstance(outcome, EngineError)
        assert "the ranks would build different plans" in str(outcome)
    assert list(tmp_path.iterdir()) == []


def test_one_rank_that_cannot_build_a_plan_fails_all_and_nothing_is_published(
    platform: Platform, checkpoint: Path, tmp_path: Path
) -> None:
    def work(ranks: Collectives) -> None:
        build(checkpoint, tmp_path / "engine", lambda: platform, workspace=1 if ranks.rank else 2**32, ranks=ranks)

    outcomes = together(2, work)
    assert all("rank 1: TensorRT could not build a plan" in str(outcome) for outcome in outcomes), outcomes
    assert list(tmp_path.iterdir()) == []
