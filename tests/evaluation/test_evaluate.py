"""The harness end to end through its commands: run, kill, resume, sweep, report, refusals, several ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from tests.evaluation.conftest import RECORDS, Nano
from tests.support.networks import build_engine
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.engine.build import BuildOptions
from trt_redknot.errors import LaunchError, RequestError
from trt_redknot.evaluation.journal import JournalError, read_journal
from trt_redknot.launch import run_ranks

PROJECT = Path(__file__).resolve().parents[2]
POLICY = ["--set", "boundary=4", "--set", "tail=0", "--set", "top_entries=2", "--set", "budget=0.2"]
SHORT = ["--records", str(RECORDS), "--only", "nano-256.jsonl", "--short-tokens", "2", "--longer-tokens", "4"]


def evaluate(*arguments: str) -> None:
    evaluate_command(None).main(list(arguments), standalone_mode=False)


def timeless(value: Any) -> Any:
    """A JSON value without wall-clock figures, and without what the number of threads changes."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if not key.endswith("_s")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def results(output: Path) -> list[Any]:
    return [timeless(pair.model_dump(mode="json")) for pair in read_journal(output / "results.jsonl")[1]]


@pytest.fixture(scope="module")
def whole(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole")
    evaluate("run", "--engine", str(nano.directory), "--output", str(output), "--limit", "2", *SHORT, *POLICY)
    return output


def test_a_run_leaves_results_summary_and_page(whole: Path) -> None:
    pairs = results(whole)
    assert [pair["longer"] for pair in pairs] == [False, False, True, True]
    assert all(pair["reuse"]["rows"]["omitted"] > 0 for pair in pairs)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["evidence"] == "measured"
    (overall,) = (group for group in summary["groups"] if group["by"] == "all")
    assert overall["pairs"] == 4
    assert overall["metrics"]["kl"]["mean"] == pytest.approx(sum(pair["kl"] for pair in pairs) / 4)
    page = (whole / "report.html").read_text()
    assert all(pair["id"] in page for pair in pairs)


def test_a_killed_run_goes_on_where_it_was(nano: Nano, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["run", "--engine", str(nano.directory), "--output", str(output), "--limit", "2", *SHORT, *POLICY]
    process = subprocess.Popen(
        [sys.executable, str(PROJECT / "run" / "evaluate.py"), *command], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    path = output / "results.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not path.is_file() or path.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < deadline, "no result in two minutes"
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    before = path.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert kept.count(b"\n") < 5, "the run was over before it was killed"
    assert not (output / "summary.json").exists()
    evaluate(*command)
    assert path.read_bytes().startswith(kept)
    assert results(output) == results(whole)


def test_results_of_another_policy_are_refused(nano: Nano, whole: Path) -> None:
    with pytest.raises(JournalError, match=r"of another run.*'budget': 0.1"):
        evaluate("run", "--engine", str(nano.directory), "--output", str(whole), "--limit", "2", *SHORT)
    with pytest.raises(JournalError, match=r"of another run.*'asked'"):
        evaluate("run", "--engine", str(nano.directory), "--output", str(whole), "--limit", "1", *SHORT, *POLICY)


def test_saved_results_are_reported_as_archived(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((whole / "summary.json").read_text())
    evaluate("report", "--output", str(whole), "--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["evidence"] == "archived"
    assert shown["groups"] == before["groups"]
    evaluate("report", "--output", str(whole))
    assert "(archived)" in capsys.readouterr().out


def test_a_dry_run_says_what_it_would_take(nano: Nano, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("sweep", "--engine", str(nano.directory), "--output", str(tmp_path), "--limit", "1", *SHORT, "--axis",
             "budget", "--dry-run")  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    assert (said["records"], said["pairs"], said["finished"]) == (2, 12, 0)
    assert 12 * 150 < said["prompt_tokens"] < 12 * 300
    assert said["estimated_seconds"] > 0
    assert not (tmp_path / "results.jsonl").exists()


def test_a_sweep_compares_engines_and_policies(nano: Nano, tmp_path: Path) -> None:
    options = BuildOptions(chunk_rows=512, dtype="float64", artifact_format=ArtifactFormat.FP8)
    packed = build_engine(nano.checkpoint, tmp_path / "packed", options=options)
    output = tmp_path / "out"
    evaluate(
        "sweep", "--engine", str(nano.directory), "--output", str(output), "--store", str(tmp_path / "store"),
        "--limit", "1", *SHORT, *POLICY, "--axis", "epilogue", "--axis", "engine", "--also", f"fp8={packed}",
    )  # fmt: skip
    run, pairs = read_journal(output / "results.jsonl")
    by_variant = {name: [p for p in pairs if p.variant == name] for name in (v["name"] for v in run["variants"])}
    assert {name: len(own) for name, own in by_variant.items()} == {
        "epilogue=full": 2, "epilogue=active": 2, "engine=base": 2, "engine=fp8": 2,
    }  # fmt: skip
    assert run["engines"]["fp8"]["artifacts"] == "fp8"
    full, base = by_variant["epilogue=full"], by_variant["engine=base"]
    assert [pair.kl for pair in full] == [pair.kl for pair in base]
    for one, other in zip(full, by_variant["epilogue=active"], strict=True):
        assert other.reuse.saved["token_rows"] > one.reuse.saved["token_rows"]
    # Packing costs something, and is not another answer altogether.
    for exact, rounded in zip(base, by_variant["engine=fp8"], strict=True):
        assert exact.kl != rounded.kl
        assert exact.recompute.tokens == rounded.recompute.tokens


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep", "--engine", "none", "--also", "base=none"],
        ["sweep", "--engine", "none", "--also", "a=none", "--also", "a=other"],
        ["report", "--group", "a=x", "--group", "a=y"],
    ],
)
def test_a_name_that_would_hide_another_is_refused(arguments: list[str], tmp_path: Path) -> None:
    records = SHORT if arguments[0] == "sweep" else []
    with pytest.raises(click.UsageError, match="is taken"):
        evaluate(*arguments, "--output", str(tmp_path), *records)


@pytest.mark.parametrize(
    ("setting", "words"), [("budgets=1", "key 'budgets' is unknown"), ("budget=2", "key 'budget' is invalid")]
)
def test_a_wrong_policy_is_refused(nano: Nano, tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        evaluate("run", "--engine", str(nano.directory), "--output", str(tmp_path), *SHORT, "--set", setting)


def test_ranks_evaluate_together(nano: Nano, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    output = tmp_path / "out"
    finished = run_ranks(
        2,
        [str(Path(__file__).parent / "ranks" / "evaluating.py"), str(nano.checkpoint), str(engine), "run", "--engine",
         str(engine), "--output", str(output), "--limit", "1", "--records", str(RECORDS), "--only", "nano-256.jsonl",
         "--short-tokens", "1", "--longer-tokens", "1", *POLICY],
        timeout_s=200,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert [pair["longer"] for pair in results(output)] == [False, True]
    assert finished.stdout.count("Reuse against recomputation") == 1


def test_one_command_measures_what_the_docs_show(nano: Nano, tmp_path: Path) -> None:
    evaluate(
        "nano", "--checkpoint", str(nano.checkpoint), "--records", str(RECORDS), "--output", str(tmp_path),
        "--sweep-file", "nano-256.jsonl", "--only", "nano-256.jsonl", "--axis", "engine", "--limit", "1",
        "--profile-records", "1", "--short-tokens", "1", "--longer-tokens", "2",
    )  # fmt: skip
    tables = (tmp_path / "tables.md").read_text()
    assert re.findall(r"^## (.*)$", tables, re.MULTILINE) == [
        "Default policy by length", "Default policy by kind of question", "engine",
    ]  # fmt: skip
    assert tables.count("Evidence: **measured**.") == 3
    assert [line.split(" | ")[0] for line in tables.splitlines()[-3:]] == ["| base", "| fp8", "| heads"]
    assert (tmp_path / "sweep" / "engine" / "nano-256.jsonl" / "report.html").is_file()
    again = tables
    # Nothing is left to do: the same command only writes the tables again, also with processes side by side.
    evaluate("nano", "--checkpoint", str(nano.checkpoint), "--records", str(RECORDS), "--output", str(tmp_path),
             "--sweep-file", "nano-256.jsonl", "--only", "nano-256.jsonl", "--axis", "engine", "--limit", "1",
             "--profile-records", "1", "--short-tokens", "1", "--longer-tokens", "2", "--jobs", "2")  # fmt: skip
    assert (tmp_path / "tables.md").read_text() == again


def test_a_measurement_that_fails_in_its_process_ends_the_command(nano: Nano, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"a measurement failed: epilogue of absent.jsonl"):
        evaluate(
            "nano", "--checkpoint", str(nano.checkpoint), "--records", str(RECORDS), "--output", str(tmp_path),
            "--sweep-file", "absent.jsonl", "--only", "nano-256.jsonl", "--axis", "epilogue", "--limit", "1",
            "--short-tokens", "1", "--longer-tokens", "1", "--jobs", "2",
        )  # fmt: skip
    assert not (tmp_path / "tables.md").exists()
