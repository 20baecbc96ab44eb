"""Bad input to every command that runs an engine: one line with cause and remedy, status 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from tests.artifacts.support import together
from tests.support.networks import NetworkOptions, build_engine, network, write_network
from trt_redknot import ArtifactStore, Engine
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.cli.artifacts import artifacts
from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.command import run_command
from trt_redknot.cli.compare import compare_command
from trt_redknot.cli.generate import generate_command
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BuildOptions, build_torch_engine
from trt_redknot.launch import run_ranks

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "examples" / "tokenizer" / "tokenizer.json"
MAX_LENGTH = 60
DOCUMENT = [5, 9, 11, 40, 2, 3, 77]


@dataclass(frozen=True, kw_only=True)
class World:
    """A checkpoint, engines of it, a store with one artifact."""

    folder: Path
    artifact_id: str

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def engine(self) -> Path:
        return self.folder / "engine"

    @property
    def store(self) -> Path:
        return self.folder / "store"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """An engine of one rank with a short limit and no tokenizer, and one of two ranks."""
    folder = tmp_path_factory.mktemp("commands")
    options = NetworkOptions(kinds="sc", hash_layers=1, seed=random.randrange(2**31))
    checkpoint = write_network(network(options), folder / "checkpoint")
    limits = BuildOptions(max_length=MAX_LENGTH)
    engine = Engine.open(build_engine(checkpoint, folder / "engine", options=limits))
    geometry = load_geometry(checkpoint)
    opened, profile = Checkpoint.open(checkpoint, geometry), SplitProfile.default(geometry)
    built = together(2, lambda ranks: build_torch_engine(opened, profile, folder / "two", limits, ranks))
    assert not any(isinstance(result, BaseException) for result in built), built
    return World(folder=folder, artifact_id=engine.build_artifact(ArtifactStore(folder / "store"), DOCUMENT))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """A command as its script runs it, in this process."""

    def run(command: click.Command, *arguments: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            run_command(lambda: command.main([str(each) for each in arguments], standalone_mode=False))
        captured = capfd.readouterr()
        assert isinstance(left.value.code, int)
        return Outcome(code=left.value.code, out=captured.out, err=captured.err)

    return run


def assert_one_line(outcome: Outcome, *parts: object, progress: str = "") -> None:
    """One line that starts with `error:` and names all of `parts`; only lines of `progress` may come before it."""
    assert outcome.code == 2, outcome
    assert outcome.out == "", outcome
    *before, line = outcome.err.splitlines()
    assert line.startswith("error: "), outcome.err
    assert all(progress and other.startswith(progress) for other in before), outcome.err
    assert "Traceback" not in outcome.err
    assert [part for part in parts if str(part) not in line] == [], line


def assert_usage(outcome: Outcome, *parts: str) -> None:
    """What click says of wrong options: the usage, then the error."""
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("Usage: "), outcome
    assert [part for part in parts if part not in outcome.err.splitlines()[-1]] == [], outcome.err


# ---- build_engine.py


def absent(path: Path) -> Path:
    return path / "absent"


def as_file(path: Path) -> Path:
    (path / "file").write_text("x", encoding="utf-8")
    return path / "file"


def spoiled(name: str, change: Callable[[Path], object]) -> Callable[[World, Path], Path]:
    def make(world: World, path: Path) -> Path:
        shutil.copytree(world.checkpoint, path / "spoiled")
        change(path / "spoiled" / name)
        return path / "spoiled"

    return make


def edit_json(**values: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")


CHECKPOINTS: dict[str, tuple[Callable[[World, Path], Path], list[str]]] = {
    "absent": (lambda world, path: absent(path), ["absent", "config.json"]),
    "a file": (lambda world, path: as_file(path), ["file"]),
    "empty": (lambda world, path: path, ["config.json"]),
    "an engine": (lambda world, path: world.engine, ["config.json"]),
    "no weights": (spoiled("model.safetensors", Path.unlink), ["no weights", "safetensors"]),
    "truncated weights": (spoiled("model.safetensors", lambda path: os.truncate(path, 999)), ["model.safetensors"]),
    "config not JSON": (spoiled("config.json", lambda path: path.write_text("{")), ["config.json", "not valid JSON"]),
    "config of another network": (spoiled("config.json", edit_json(hidden_size=72)), ["spoiled"]),
    "config with a wrong type": (spoiled("config.json", edit_json(hidden_size="wide")), ["hidden_size", "wide"]),
    "a link in place of the tokenizer": (
        spoiled("tokenizer.json", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n")),
        ["tokenizer cannot be read", "tokenizer.json", "Fetch the file again"],
    ),
    "config of another model": (spoiled("config.json", edit_json(model_type="llama")), ["llama"]),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_build_refuses_what_is_no_checkpoint(
    world: World, run: Callable[..., Outcome], tmp_path: Path, name: str
) -> None:
    make, parts = CHECKPOINTS[name]
    output = tmp_path / "out" / "engine"
    outcome = run(build_engine_command(None), "--checkpoint", make(world, tmp_path), "--output", output)
    assert_one_line(outcome, *parts)
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--tp", "2"], ["expected 2 MPI ranks", "found 1", "mpirun -n 2"]),
        (["--tp", "3"], ["output groups", "expected one of [1, 2]", "found 3"]),
        (["--backend", "tensorrt"], ["--backend torch", "tensorrt"]),
        (["--profile", "flash"], ["not the released flash", "--profile auto"]),
        (["--profile", "turbo"], ["profile is unknown", "turbo", "--profile auto"]),
        (["--profile", "absent.json"], ["absent.json", "cannot be read"]),
    ],
)
def test_build_refuses_options_that_do_not_fit(
    world: World, run: Callable[..., Outcome], tmp_path: Path, options: list[str], parts: list[str]
) -> None:
    output = tmp_path / "out" / "engine"
    outcome = run(build_engine_command(None), "--checkpoint", world.checkpoint, "--output", output, *options)
    assert_one_line(outcome, *parts)
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"fences": 3}, "key 'fences' is unknown"),
        ({"leading_fence": "two"}, "key 'leading_fence' is invalid"),
        ({"trailing_fence": 7}, "fences overlap"),
        ({"heads_per_group": 3}, "heads_per_group does not fit"),
        ({"global_heads": {"1": [0, 9]}}, "global_heads"),
    ],
)
def test_build_refuses_profiles_that_do_not_fit(
    world: World, run: Callable[..., Outcome], tmp_path: Path, change: dict[str, object], part: str
) -> None:
    profile = SplitProfile.default(load_geometry(world.checkpoint)).model_dump(mode="json")
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile, **change}), encoding="utf-8")
    arguments = ["--checkpoint", world.checkpoint, "--output", tmp_path / "engine", "--profile", path]
    assert_one_line(run(build_engine_command(None), *arguments), part)
    assert not (tmp_path / "engine").exists()


def test_build_refuses_outputs_that_cannot_be(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    build = ["--checkpoint", world.checkpoint, "--output"]
    outcome = run(build_engine_command(None), *build, world.engine)
    assert_one_line(outcome, "exists already", world.engine, "Remove it, or choose another --output")
    outcome = run(build_engine_command(None), *build, as_file(tmp_path) / "engine")
    assert_one_line(outcome, "cannot be written", "Not a directory", "permissions")
    assert Engine.open(world.engine).manifest.max_length == MAX_LENGTH


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--checkpoint is needed"),
        (["--dry-run"], "--checkpoint is needed"),
        (["--checkpoint", "here", "--tp", "0"], "--tp"),
        (["--checkpoint", "here", "--max-length", "1"], "--max-length"),
        (["--checkpoint", "here", "--chunk-rows", "-5"], "--chunk-rows"),
        (["--checkpoint", "here", "--dtype", "int4"], "--dtype"),
        *(
            (["--dry-run", "--profile", "flash", "--gpu-memory", size], "--gpu-memory")
            for size in ("nan", "inf", "1e300")
        ),
        (["--chekpoint", "here"], "--chekpoint"),
    ],
)
def test_build_refuses_wrong_usage(run: Callable[..., Outcome], arguments: list[str], part: str) -> None:
    assert_usage(run(build_engine_command(None), *arguments), part)


def test_build_needs_an_output_beside_a_checkpoint(world: World, run: Callable[..., Outcome]) -> None:
    assert_usage(run(build_engine_command(None), "--checkpoint", world.checkpoint), "--output")


def test_build_estimates_only_what_can_be_built(run: Callable[..., Outcome]) -> None:
    outcome = run(build_engine_command(None), "--dry-run", "--profile", "flash", "--tp", "3")
    assert_one_line(outcome, "output groups", "found 3")


@pytest.mark.parametrize("backend", ["torch", "tensorrt"])
def test_a_dry_run_ends_with_whether_it_fits(run: Callable[..., Outcome], backend: str) -> None:
    options = ["--dtype", "bfloat16", "--experts", "fp8"] if backend == "torch" else ["--backend", backend]
    outcome = run(
        build_engine_command(None), "--dry-run", "--profile", "pro", "--tp", "8", *options, "--gpu-memory", "139"
    )
    assert outcome.code == 0
    said = " ".join(outcome.out.split()).rpartition("pro at TP 8 in bfloat16 with FP8 experts ")[2]
    assert said.startswith("DOES NOT FIT into 139.00 GiB (named by --gpu-memory): a rank needs ")
    assert said.endswith("It fits from 16 ranks on.")


# ---- run/generate.py


def write_request(path: Path, **values: Any) -> Path:
    content = {"segments": [{"tokens": [1, 2, 3]}], "max_new_tokens": 2, **values}
    (path / "request.json").write_text(json.dumps(content), encoding="utf-8")
    return path / "request.json"


def generate(run: Callable[..., Outcome], world: World, path: Path, *more: object, **values: Any) -> Outcome:
    arguments = ["--engine", world.engine, "--store", world.store, "--request", write_request(path, **values)]
    return run(generate_command(None), *arguments, *more)


def test_generate_answers_good_requests(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    segments = [{"artifact": world.artifact_id}, {"tokens": [4]}]
    output = tmp_path / "new" / "answer.json"
    outcome = generate(run, world, tmp_path, "--json", output, segments=segments, stop_tokens=[])
    assert outcome.code == 0, outcome
    answer = json.loads(output.read_text(encoding="utf-8"))
    assert len(answer["tokens"]) == 2
    assert answer["report"]["arm"] == "reuse"


def test_generate_counts_and_logs(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    segments = [{"artifact": "0" * 32, "tokens": [1, 2, 3]}, {"tokens": [4]}]
    log, metrics = tmp_path / "log.jsonl", tmp_path / "redknot.prom"
    outcome = generate(run, world, tmp_path, "--log", log, "--metrics", metrics, segments=segments, stop_tokens=[])
    assert outcome.code == 0, outcome
    assert 'redknot_fallbacks_total{reason="missing_artifact"} 1.0' in metrics.read_text(encoding="utf-8")
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [event["reason"] for event in events if event["event"] == "fallback"] == ["missing_artifact"]


def test_a_device_that_is_not_there(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    assert_one_line(generate(run, world, tmp_path, "--device", "cuda:77"), "no such GPU", "found cuda:77", "doctor")
    assert_one_line(generate(run, world, tmp_path, "--device", "abacus"), "no such device", "found abacus")


REQUESTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no segments": ({"segments": []}, ["the request is empty", "at least one segment"]),
    "empty segment": ({"segments": [{"tokens": []}]}, ["segment 0 is empty", "Leave it out"]),
    "token above": ({"segments": [{"tokens": [1, 97]}]}, ["expected 0 .. 96", "found 97 at position 1", "Tokenize"]),
    "token below": ({"segments": [{"tokens": [-1]}]}, ["expected 0 .. 96", "found -1 at position 0"]),
    "token huge": ({"segments": [{"tokens": [2**70]}]}, ["segment 0"]),
    "token a float": ({"segments": [{"tokens": [1.5]}]}, ["segments.0.tokens.0", "1.5"]),
    "token a flag": ({"segments": [{"tokens": [True]}]}, ["segments.0.tokens.0", "True"]),
    "too long": ({"segments": [{"tokens": [1] * 59}]}, ["at most 60", "found 59 + 2", "--max-length"]),
    "too many new": ({"max_new_tokens": 58}, ["at most 60", "found 3 + 58", "--max-length"]),
    "no new": ({"max_new_tokens": 0}, ["max_new_tokens", "1 or more", "found 0"]),
    "unknown key": ({"max_tokens": 5}, ["key 'max_tokens' is unknown", "Correct or remove"]),
    "unknown key of a segment": ({"segments": [{"token": [1]}]}, ["segments.0.token"]),
    "unknown key of the policy": ({"reuse": {"buget": 0.1}}, ["key 'reuse.buget' is unknown"]),
    "unknown key of sampling": ({"sampling": {"temp": 1}}, ["key 'sampling.temp' is unknown"]),
    "budget": ({"reuse": {"budget": 1.5}}, ["reuse.budget", "1.5"]),
    "tau": ({"reuse": {"tau": 0.0}}, ["reuse.tau"]),
    "two kinds": ({"segments": [{"tokens": [1], "text": "a"}]}, ["either artifact, or tokens, or text"]),
    "edits of tokens": ({"segments": [{"tokens": [1], "edits": {"0": 1}}]}, ["only an artifact segment has edits"]),
    "text": ({"segments": [{"text": "Where?"}]}, ["no tokenizer", "tokenizer.json", "token ids instead"]),
    "temperature": ({"sampling": {"temperature": -1.0}}, ["temperature", "found -1.0"]),
    "top_p": ({"sampling": {"top_p": 0.0}}, ["top_p", "found 0.0"]),
    "top_k": ({"sampling": {"top_k": 0}}, ["top_k", "found 0"]),
    "seed": ({"sampling": {"seed": 2**70}}, ["seed"]),
    "stop token": ({"stop_tokens": [97]}, ["stop_tokens", "expected 0 .. 96", "found 97"]),
    "unknown artifact": (
        {"segments": [{"artifact": "0" * 32}]},
        ["0" * 32, "or build it: python -m trt_redknot artifacts build"],
    ),
    "no artifact id": (
        {"segments": [{"artifact": "../../etc"}]},
        ["../../etc", "or build it: python -m trt_redknot artifacts build"],
    ),
    "unknown artifact, recomputed": (
        {"segments": [{"artifact": "0" * 32}], "reuse": None},
        ["0" * 32, "or build it: python -m trt_redknot artifacts build"],
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_generate_refuses_bad_requests(world: World, run: Callable[..., Outcome], tmp_path: Path, name: str) -> None:
    values, parts = REQUESTS[name]
    output = tmp_path / "answer.json"
    assert_one_line(generate(run, world, tmp_path, "--json", output, **values), *parts)
    assert not output.exists()


@pytest.mark.parametrize("reuse", [{}, None])
@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"edits": {"7": 1}}, "found 7"),
        ({"edits": {"0": 97}}, "97"),
        ({"tokens": [97]}, "97"),
        ({"tokens": []}, "no tokens"),
    ],
)
def test_generate_refuses_bad_documents(
    world: World, run: Callable[..., Outcome], tmp_path: Path, more: dict[str, Any], part: str, reuse: object
) -> None:
    segments = [{"artifact": world.artifact_id, **more}]
    assert_one_line(generate(run, world, tmp_path, segments=segments, reuse=reuse), part)


def test_generate_refuses_files_that_are_no_requests(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    arguments = ["--engine", world.engine, "--store", world.store, "--request", path]
    for content, part in (
        (None, "cannot be read"),
        (b"", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"segments": [], "segments": []}', "'segments' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        if content is not None:
            path.write_bytes(content)
        assert_one_line(run(generate_command(None), *arguments), part, path)
    assert_one_line(run(generate_command(None), *arguments[:-1], tmp_path), "cannot be read", tmp_path)


def test_generate_refuses_wrong_engines(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    request = write_request(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(world.engine, damaged)
    os.truncate(damaged / "rank-0000" / "shared.safetensors", 50)
    for engine, parts in (
        (absent(tmp_path), ["not an engine directory", "build_engine.py"]),
        (as_file(tmp_path), ["not an engine directory", "build_engine.py"]),
        (world.checkpoint, ["not an engine directory", "expected engine.json"]),
        (world.store, ["not an engine directory", "expected engine.json"]),
        (world.folder / "two", ["another number of ranks", "expected 2", "found 1", "mpirun -n 2"]),
        (damaged, ["shared.safetensors", "another size", "found 50", "build_engine.py"]),
    ):
        arguments = ["--engine", engine, "--store", world.store, "--request", request]
        assert_one_line(run(generate_command(None), *arguments), *parts)


def test_generate_refuses_wrong_stores(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    request = write_request(tmp_path, segments=[{"artifact": world.artifact_id}])
    arguments = ["--engine", world.engine, "--request", request, "--store"]
    outcome = run(generate_command(None), *arguments, as_file(tmp_path))
    assert_one_line(outcome, "the artifact store is not a folder", tmp_path / "file", "Name a folder")
    outcome = run(generate_command(None), *arguments, absent(tmp_path))
    assert_one_line(outcome, world.artifact_id, "or build it: python -m trt_redknot artifacts build")
    assert not absent(tmp_path).exists()
    outcome = run(generate_command(None), *arguments, world.store, "--namespace", "../else")
    assert_one_line(outcome, "namespace", "../else")
    outcome = run(generate_command(None), *arguments, world.store, "--namespace", "else")
    assert_one_line(outcome, world.artifact_id, "or build it: python -m trt_redknot artifacts build")


def test_generate_says_where_it_cannot_write(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    for output in (as_file(tmp_path) / "answer.json", tmp_path):
        outcome = generate(run, world, tmp_path, "--json", output)
        assert outcome.code == 2
        assert outcome.err.splitlines()[-1].startswith("error: the response cannot be written: ")
        assert str(output) in outcome.err
        # The answer was paid for: it is shown although it cannot be kept.
        assert "recompute" in outcome.out


def test_generate_refuses_an_arm_that_the_request_forbids(
    world: World, run: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = generate(run, world, tmp_path, "--arm", "reuse", reuse=None)
    assert_one_line(outcome, "no reuse policy", "request.json", "Give it one")
    assert_usage(generate(run, world, tmp_path, "--arm", "faster"), "--arm")
    assert_usage(run(generate_command(None), "--engine", world.engine), "--store")


# ---- artifacts build


def build(run: Callable[..., Outcome], world: World, *arguments: object) -> Outcome:
    return run(artifacts, "build", "--engine", world.engine, *arguments)


def test_artifacts_build_builds(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    outcome = build(run, world, "--store", tmp_path / "store", tmp_path / "ids.json", "--json")
    assert outcome.code == 0, outcome
    assert [row["artifact_id"] for row in json.loads(outcome.out)] == [world.artifact_id]


def test_a_list_never_loses_a_document(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    for folder, extra in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ids.json").write_text(json.dumps([*DOCUMENT, extra]), encoding="utf-8")
    listed, store = tmp_path / "list.json", tmp_path / "store"
    one, other = tmp_path / "a" / "ids.json", tmp_path / "b" / "ids.json"
    outcome = build(run, world, "--store", store, one, other, "--list", listed)
    assert_one_line(outcome, "cannot tell two documents apart", f"found {one} and {other}")
    assert not list(tmp_path.rglob("certificate.json"))
    assert build(run, world, "--store", store, one, one, "--list", listed).code == 0
    assert list(json.loads(listed.read_text(encoding="utf-8"))) == ["ids.json"]


DOCUMENTS: dict[str, tuple[str, bytes, list[str]]] = {
    "text without a tokenizer": ("a.txt", b"hello", ["no tokenizer", "token ids instead"]),
    "unknown kind": ("a.pdf", b"hello", ["unknown kind", "found .pdf"]),
    "not UTF-8": ("a.json", b"\xff\xfe", ["not UTF-8", "a.json"]),
    "not JSON": ("a.json", b"[1,", ["not JSON", "a.json"]),
    "not a list": ("a.json", b'{"a": 1}', ["JSON list of integers", "a.json"]),
    "not integers": ("a.json", b"[1, 2.5]", ["JSON list of integers", "a.json"]),
    "empty": ("a.json", b"[]", ["a.json", "empty", "at least one token"]),
    "token outside": ("a.json", b"[1, 97]", ["a.json", "vocabulary", "found 97 at position 1"]),
    "token huge": ("a.json", b"[1" + b"0" * 30 + b"]", ["a.json is not a list of token ids"]),
    "too long": ("a.json", json.dumps([1] * 61).encode(), ["a.json is too long", "at most 60", "found 61"]),
    "deep": ("a.json", b"[" * 100_000, ["not JSON", "a.json"]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_artifacts_build_refuses_bad_documents(
    world: World, run: Callable[..., Outcome], tmp_path: Path, name: str
) -> None:
    file, content, parts = DOCUMENTS[name]
    (tmp_path / file).write_bytes(content)
    outcome = build(run, world, "--store", tmp_path / "store", tmp_path / file)
    assert_one_line(outcome, *parts)
    assert not list(tmp_path.rglob("certificate.json"))


def test_artifacts_build_refuses_wrong_places(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    document, store = tmp_path / "ids.json", tmp_path / "store"
    assert_one_line(build(run, world, "--store", as_file(tmp_path), document), "not a folder", "Name a folder")
    assert_one_line(build(run, world, "--store", store, absent(tmp_path)), "no such document", "absent")
    assert_one_line(build(run, world, "--store", store, tmp_path / "empty"), "no documents", ".txt")
    assert_one_line(build(run, world, "--store", store, document, "--capacity", 100), "100")
    outcome = run(artifacts, "build", "--engine", world.folder / "two", "--store", store, document)
    assert_one_line(outcome, "another number of ranks", "mpirun -n 2")
    assert not list(tmp_path.rglob("certificate.json"))
    assert_usage(build(run, world, "--store", store), "PATHS")


def test_compare_refuses_what_it_cannot_ask(world: World, run: Callable[..., Outcome], tmp_path: Path) -> None:
    options = ["--store", world.store, "--question", "Where?"]
    outcome = run(compare_command(None), "--engine", world.engine, *options, tmp_path)
    assert_one_line(outcome, "no tokenizer")
    outcome = run(compare_command(None), "--engine", absent(tmp_path), *options, tmp_path)
    assert_one_line(outcome, "not an engine directory", "build_engine.py")


# ---- the scripts themselves


def script(*arguments: object) -> Outcome:
    finished = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False, cwd=ROOT
    )
    return Outcome(code=finished.returncode, out=finished.stdout, err=finished.stderr)


def test_the_scripts_leave_with_one_line(world: World, tmp_path: Path) -> None:
    outcome = script("build_engine.py", "--checkpoint", absent(tmp_path), "--output", tmp_path / "engine")
    assert_one_line(outcome, "absent")
    request = write_request(tmp_path, segments=[{"tokens": [97]}])
    outcome = script("run/generate.py", "--engine", world.engine, "--store", world.store, "--request", request)
    assert_one_line(outcome, "outside the vocabulary", "found 97")


def test_ranks_leave_together_with_one_line(world: World, tmp_path: Path) -> None:
    arguments = ["--engine", str(world.engine), "--store", str(world.store), "--request", str(write_request(tmp_path))]
    finished = run_ranks(2, [str(ROOT / "run" / "generate.py"), *arguments], timeout_s=200)
    outcome = Outcome(code=finished.returncode, out=finished.stdout, err=finished.stderr)
    assert outcome.code == 2
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    assert "another number of ranks, expected 1, found 2" in errors[0]
    assert "Traceback" not in outcome.err
