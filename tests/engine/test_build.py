"""Building an engine: every rank its part, all or nothing, whatever fails and whenever it is killed."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.artifacts.support import together
from tests.engine.ranks.job import ROOT, rank_environment
from tests.support.networks import NetworkOptions, build_engine, network, write_network
from trt_redknot import Engine
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine import build
from trt_redknot.engine.build import BuildOptions, build_torch_engine
from trt_redknot.engine.manifest import MANIFEST, EngineManifest, check_files, read_manifest, weight_files
from trt_redknot.errors import CheckpointError, EngineError, RedKnotError
from trt_redknot.launch import run_ranks

LAYERS = 3
# Rank 0's first layer file does not fit.
WRITE_LIMIT_BYTES = 16 << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = NetworkOptions(kinds="chs", hash_layers=1, groups=4, experts=7, seed=random.randrange(2**31))
    return write_network(network(options), tmp_path_factory.mktemp("build") / "checkpoint")


def build_on(
    ranks: Collectives,
    checkpoint: Path,
    output: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> EngineManifest:
    geometry = load_geometry(checkpoint)
    return build_torch_engine(
        Checkpoint.open(checkpoint, geometry), SplitProfile.default(geometry), output, BuildOptions(), ranks,
        progress=progress,
    )  # fmt: skip


def assert_refused(results: list[EngineManifest | BaseException], kind: type[RedKnotError], text: str) -> None:
    """The same typed error on every rank."""
    assert {type(result) for result in results} == {kind}, results
    assert len({str(result) for result in results}) == 1
    assert text in str(results[0])


def test_ranks_build_their_own_parts_and_one_manifest(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "made" / "engine"
    arguments = ["--checkpoint", str(checkpoint), "--output", str(output), "--tp", "2", "--json"]
    finished = run_ranks(2, [str(ROOT / "build_engine.py"), *arguments], timeout_s=200, environment=rank_environment())
    assert finished.returncode == 0, finished.stderr
    printed = json.loads(finished.stdout)
    manifest, geometry = read_manifest(output)
    assert printed == {"engine": str(output), "tp_size": 2, "checkpoint": manifest.checkpoint_fingerprint}
    assert [path.name for path in output.parent.iterdir()] == ["engine"]
    assert geometry == load_geometry(checkpoint)

    one = tmp_path / "one"
    build_on(LocalCollectives(), checkpoint, one)
    assert read_manifest(one)[0].checkpoint_fingerprint == manifest.checkpoint_fingerprint
    parts = []
    for rank in manifest.ranks:
        assert tuple(file.path for file in rank.files) == weight_files(rank.rank, LAYERS)
        check_files(output, rank.files, digests=True)
        parts.append(load_file(output / f"rank-{rank.rank:04d}" / "layer-0001.safetensors"))
    whole = load_file(one / "rank-0000" / "layer-0001.safetensors")
    for name, axis in (("attn.o_a_global", 0), ("attn.o_b", 1), ("experts.down", 0), ("attn.sinks_local", 0)):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=axis), whole[name]), name
    assert all(torch.equal(part["attn.kv"], whole["attn.kv"]) for part in parts)
    assert [len(part["experts.down"]) for part in parts] == [4, 3]
    files = [*manifest.tokenizer_files, *(file for rank in manifest.ranks for file in rank.files)]
    listed = {MANIFEST, *(file.path for file in files)}
    assert {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} == listed


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_existing_output_is_refused_and_left_alone(checkpoint: Path, tmp_path: Path, size: int) -> None:
    outputs = [tmp_path / name for name in ("file", "folder", "link")]
    outputs[0].write_text("precious", encoding="utf-8")
    outputs[1].mkdir()
    outputs[2].symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for output in outputs:
        results = together(size, lambda ranks, output=output: build_on(ranks, checkpoint, output))  # type: ignore[misc]
        assert_refused(results, EngineError, f"the output exists already, in {output}. Remove it")
    assert sorted(tmp_path.rglob("*")) == before
    assert outputs[0].read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_that_cannot_read_leaves_nothing(checkpoint: Path, tmp_path: Path, size: int) -> None:
    """One random rank's copy of the checkpoint is cut after it was opened."""
    odd = random.randrange(size)
    spoiled = tmp_path / "spoiled"
    shutil.copytree(checkpoint, spoiled)
    output = tmp_path / "out" / "engine"

    def work(ranks: Collectives) -> EngineManifest:
        if ranks.rank != odd:
            return build_on(ranks, checkpoint, output)

        def spoil(done: int) -> None:
            if done == 1:
                os.truncate(spoiled / "model.safetensors", 100)

        return build_on(ranks, spoiled, output, spoil)

    assert_refused(together(size, work), CheckpointError, "model.safetensors")
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_full_disk_leaves_nothing(
    checkpoint: Path, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd, fatal = random.randrange(size), random.choice([*range(LAYERS), "shared"])
    name = f"rank-{odd:04d}/{fatal if fatal == 'shared' else f'layer-{fatal:04d}'}.safetensors"
    save_file = build.save_file

    def failing(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if str(path).endswith(name):
            raise OSError(28, "No space left on device", str(path))
        save_file(tensors, path)

    monkeypatch.setattr(build, "save_file", failing)
    output = tmp_path / "out" / "engine"
    results = together(size, lambda ranks: build_on(ranks, checkpoint, output))
    assert_refused(results, EngineError, "No space left on device")
    assert "Check free space" in str(results[0])
    assert list(output.parent.iterdir()) == []
    monkeypatch.undo()
    results = together(size, lambda ranks: build_on(ranks, checkpoint, output))
    assert all(isinstance(result, EngineManifest) for result in results), results


def test_a_file_that_the_system_refuses_to_grow_is_one_error(checkpoint: Path, tmp_path: Path) -> None:
    """The operating system's own refusal, which reaches us through the tensor library."""
    output = tmp_path / "out" / "engine"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (WRITE_LIMIT_BYTES, hard))
    try:
        with pytest.raises(EngineError, match="the engine cannot be written") as caught:
            build_on(LocalCollectives(), checkpoint, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "layer-0000.safetensors" in str(caught.value)
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("size", [1, 3])
def test_an_output_that_appears_meanwhile_is_not_replaced(checkpoint: Path, tmp_path: Path, size: int) -> None:
    if size == 3:
        checkpoint = write_network(network(NetworkOptions(kinds="s", groups=3)), tmp_path / "checkpoint")
    output = tmp_path / "out" / "engine"

    def work(ranks: Collectives) -> EngineManifest:
        return build_on(ranks, checkpoint, output, lambda done: output.mkdir(exist_ok=True))

    assert_refused(together(size, work), EngineError, "the output appeared while the engine was built")
    assert [path.name for path in output.parent.iterdir()] == ["engine"]
    assert list(output.iterdir()) == []


def test_an_output_below_a_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    results = together(2, lambda ranks: build_on(ranks, checkpoint, tmp_path / "file" / "engine"))
    assert_refused(results, EngineError, "the engine cannot be written: Not a directory")


def test_an_interrupt_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_on(LocalCollectives(), checkpoint, tmp_path / "out" / "engine", interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def assert_nothing_opens(output: Path) -> None:
    assert not output.exists()
    for left in output.parent.iterdir():
        with pytest.raises(EngineError, match="not an engine directory"):
            Engine.open(left)


def test_a_killed_build_leaves_no_engine(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "engine"
    arguments = [str(checkpoint), str(output), "0", str(random.randrange(1, LAYERS + 2))]
    finished = subprocess.run(
        [sys.executable, "-m", "tests.engine.ranks.building", *arguments], env=rank_environment(), timeout=200,
        check=False,
    )  # fmt: skip
    assert finished.returncode == -9
    assert len(list(output.parent.iterdir())) == 1
    assert_nothing_opens(output)
    # What was left behind is in nobody's way, and gone with the next build.
    assert Engine.open(build_engine(checkpoint, output)).geometry.layers == LAYERS
    assert [path.name for path in output.parent.iterdir()] == ["engine"]


def test_a_killed_rank_ends_the_build_of_all(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "engine"
    arguments = [str(checkpoint), str(output), str(random.randrange(2)), str(random.randrange(1, LAYERS + 2))]
    finished = run_ranks(
        2, ["-m", "tests.engine.ranks.building", *arguments], timeout_s=200, environment=rank_environment()
    )
    assert finished.returncode != 0
    assert_nothing_opens(output)
