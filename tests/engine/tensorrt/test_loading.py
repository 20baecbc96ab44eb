"""A whole engine directory of plans becomes an engine that answers, TensorRT and CUDA played by fakes."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.ranks.job import make_engine
from tests.support.fake_tensorrt import FakeCuda, Journal, fake_module
from tests.support.interpreter import Interpreter
from tests.support.plan_engine import VOCAB, load_for_plans, write_plan_network
from trt_redknot import Engine, Request, Tokens
from trt_redknot.digests import digest_file
from trt_redknot.engine import engine as engine_module
from trt_redknot.engine import loading
from trt_redknot.engine.loading import load_rank
from trt_redknot.engine.manifest import EngineFile, EngineManifest, PlanRecord, read_manifest
from trt_redknot.engine.tensorrt import session as session_module
from trt_redknot.engine.tensorrt import starting
from trt_redknot.engine.tensorrt.build import plan_path
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase
from trt_redknot.engine.weights import quantised
from trt_redknot.errors import EngineError

GPU = torch.device("cuda", 0)


@dataclass(kw_only=True)
class Machine:
    """A directory of plans, and what pretends to be the machine that it was built on."""

    directory: Path
    platform: Platform
    interpreter: Interpreter
    journal: Journal


def written(directory: Path, manifest: EngineManifest) -> None:
    (directory / "engine.json").write_bytes(manifest.encode())


def recorded(directory: Path, path: str) -> EngineFile:
    return EngineFile(path=path, bytes=(directory / path).stat().st_size, digest=digest_file(directory / path))


@pytest.fixture
def machine(platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """An engine of the torch backend in bf16, made over into one whose plans are fakes."""
    checkpoint = write_plan_network(tmp_path / "checkpoint", random.randrange(2**31))
    directory = tmp_path / "engine"
    make_engine(checkpoint, directory, None, chunk_rows=20, dtype="bfloat16")
    files = load_for_plans(directory, None)
    manifest, _ = read_manifest(directory)
    for layer in range(len(files.layers)):
        path = directory / f"rank-0000/layer-{layer:04d}.safetensors"
        save_file(quantised(load_file(path)), path)
    (directory / "plans").mkdir()
    for spec in files.specs:
        (directory / plan_path(spec)).write_text(spec.kind.name)
    limits = dataclasses.replace(files.limits, max_length=manifest.max_length)
    journal, interpreter = Journal(), dataclasses.replace(files, limits=limits).interpreter(platform)
    module = fake_module(files.specs, limits, interpreter.run, journal)
    fake = dataclasses.replace(platform, module=module, gpu="a fake", plugin_build="cut")
    paths = [*(file.path for file in manifest.ranks[0].files), *(plan_path(spec) for spec in files.specs)]
    rank = manifest.ranks[0].model_copy(update={"files": tuple(recorded(directory, path) for path in paths)})
    record = PlanRecord(
        decode_rows=limits.decode_rows, segments=limits.segments, pool_tokens=None, packed_cache=False,
        packed_local=False, collectives="none",
    )  # fmt: skip
    update = {
        "backend": "tensorrt", "experts": "fp8", "ranks": (rank,), "plans": record, "gpu": fake.gpu,
        "plugin_build": fake.plugin_build,
        "versions": {**manifest.versions, "tensorrt": fake.version},
    }  # fmt: skip
    written(directory, manifest.model_copy(update=update))
    monkeypatch.setattr(loading, "find_platform", lambda index: fake)
    monkeypatch.setattr(loading, "load_file", lambda path, device: load_file(path))
    monkeypatch.setattr(starting, "find_cuda_runtime", lambda: FakeCuda(journal))
    monkeypatch.setattr(session_module, "POOLS", frozenset())
    return Machine(directory=directory, platform=fake, interpreter=interpreter, journal=journal)


def test_an_engine_of_plans_opens_and_answers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `Engine.open` but for the device, which is asked for and not there."""
    loads = loading.load_rank

    def on_cpu(directory: Path, rank: int, size: int, device: torch.device, *, verify: bool) -> Any:
        return dataclasses.replace(loads(directory, rank, size, GPU, verify=verify), device=torch.device("cpu"))

    monkeypatch.setattr(engine_module, "load_rank", on_cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 5}))
    engine = Engine.open(machine.directory, device="cpu")
    tokens = [random.randrange(VOCAB) for _ in range(30)]
    response = engine.generate(Request(segments=[Tokens(tokens)], max_new_tokens=2, stop_tokens=[]))
    assert len(response.tokens) == 2
    assert bool(response.first_logits.isfinite().all())
    assert [entry[:2] for entry in machine.journal.entries if isinstance(entry[1], Phase)] == machine.interpreter.runs
    assert {entry[2] for entry in machine.journal.entries} == {5}


def refused(machine: Machine) -> EngineError:
    with pytest.raises(EngineError) as caught:
        load_rank(machine.directory, 0, 1, GPU, verify=True)
    return caught.value


def test_another_machine_is_refused_before_a_weight_is_loaded(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_file", lambda path, device: pytest.fail("loaded"))
    other = dataclasses.replace(machine.platform, gpu="another")
    monkeypatch.setattr(loading, "find_platform", lambda index: other)
    error = refused(machine)
    assert (error.problem, error.expected, error.found) == (
        "the engine was built with another GPU",
        "a fake",
        "another",
    )


def test_the_manifest_lists_all_plans_in_order(machine: Machine) -> None:
    manifest, _ = read_manifest(machine.directory)
    rank = manifest.ranks[0].model_copy(update={"files": manifest.ranks[0].files[:-1]})
    written(machine.directory, manifest.model_copy(update={"ranks": (rank,)}))
    assert "does not list what the rank loads" in str(refused(machine))


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        (lambda t: {**t, "attn.kv": t["attn.kv"][:-1].contiguous()}, "bfloat16 [512, 128]", "bfloat16 [511, 128]"),
        (lambda t: {**t, "attn.kv": t["attn.kv"].float()}, "bfloat16 [512, 128]", "float32 [512, 128]"),
        (lambda t: {k: v for k, v in t.items() if k != "attn.kv"}, "bfloat16 [512, 128]", "nothing"),
        (lambda t: {**t, "attn.more": t["attn.kv"].clone()}, "no such tensor", "bfloat16 [512, 128]"),
    ],
)
def test_tensors_that_are_not_of_the_geometry_are_refused_although_the_digests_fit(
    machine: Machine, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], expected: str, found: str
) -> None:
    path = machine.directory / "rank-0000/layer-0002.safetensors"
    save_file(change(load_file(path)), path)
    manifest, _ = read_manifest(machine.directory)
    name = str(path.relative_to(machine.directory))
    files = tuple(recorded(machine.directory, name) if f.path == name else f for f in manifest.ranks[0].files)
    rank = manifest.ranks[0].model_copy(update={"files": files})
    written(machine.directory, manifest.model_copy(update={"ranks": (rank,)}))
    error = refused(machine)
    assert "is not what the engine's geometry says" in str(error)
    assert (error.expected, error.found, error.path) == (expected, found, path)


def test_a_torch_engine_s_tensors_are_held_to_the_geometry_too(tmp_path: Path) -> None:
    checkpoint = write_plan_network(tmp_path / "checkpoint", 3)
    make_engine(checkpoint, tmp_path / "engine", None, chunk_rows=20, dtype="float64")
    directory = tmp_path / "engine"
    path = directory / "rank-0000/shared.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "norm": tensors["norm"].float()}, path)
    data = json.loads((directory / "engine.json").read_text())
    data.pop("digest")
    manifest = EngineManifest.model_validate_json(json.dumps(data))
    files = tuple(
        recorded(directory, f.path) if f.path.endswith("shared.safetensors") else f for f in manifest.ranks[0].files
    )
    rank = manifest.ranks[0].model_copy(update={"files": files})
    written(directory, manifest.model_copy(update={"ranks": (rank,)}))
    with pytest.raises(EngineError, match=r"tensor 'norm'.*expected float64 \[128\], found float32 \[128\]"):
        Engine.open(directory)
