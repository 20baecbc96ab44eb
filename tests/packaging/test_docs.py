"""README and docs: links, tables, and commands that are typed as they stand there."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.artifacts.certificate import Certificate
from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.compare import compare_command
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.cli.generate import generate_command
from trt_redknot.cli.main import cli
from trt_redknot.cli.profile_heads import profile_heads_command
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.reports.report import Report
from trt_redknot.serving.bench.command import bench
from trt_redknot.serving.messages import ServingFault
from trt_redknot.serving.triton_launch import serve
from trt_redknot.serving.triton_probe import probe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
COMMANDS: dict[str, click.Command] = {
    "build_engine.py": build_engine_command(None),
    "run/bench_serving.py": bench,
    "run/compare.py": compare_command(None),
    "run/evaluate.py": evaluate_command(None),
    "run/generate.py": generate_command(None),
    "run/probe_triton.py": probe,
    "run/profile_heads.py": profile_heads_command(None),
    "run/serve_triton.sh": serve,
    "trt_redknot": cli,
}
SCRIPTS = ("run/bench_ttft.py", "run/demo.py", "run/train_nano.py", "examples/make_checkpoint.py",
           "examples/nano/make_data.py", "benches/bench_store.py", "benches/profile_prefill.py")  # fmt: skip


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def typed(text: str) -> Iterator[list[str]]:
    """Words of every command: of indented lines with the lines they go on in, and of code inside of sentences."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    for part in [*(line for line in lines if line.startswith("    ")), *re.findall(r"`([^`\n]+)`", text)]:
        try:
            yield shlex.split(part, comments=True)
        except ValueError:
            # A piece of a sentence.
            continue


def options(command: click.Command) -> set[str]:
    found = {"-h", "--help"}
    for parameter in command.params:
        found.update(parameter.opts, parameter.secondary_opts)
    return found


def subcommand(command: click.Command, name: str) -> click.Command | None:
    return command.get_command(click.Context(command), name) if isinstance(command, click.Group) else None


@pytest.fixture(scope="module")
def commands() -> dict[str, click.Command]:
    scripts = {name: runpy.run_path(str(ROOT / name), run_name="docs")["main"] for name in SCRIPTS}
    assert all(isinstance(script, click.Command) for script in scripts.values())
    return COMMANDS | scripts


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, wanted = target.partition("#")
        there = page if not name else page.parent / name
        assert there.exists(), target
        if wanted:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert wanted in map(anchor, headings), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_are_there(page: Path) -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [f"/{name}" for name in done.stdout.splitlines()]
    for name in re.findall(
        r"`([\w./-]+/[\w.-]+\.(?:py|cu|cuh|cpp|h|md|sh|txt|json))`", page.read_text(encoding="utf-8")
    ):
        # Names may be shortened to what tells them apart; generated files have a folder that is not in the repository.
        assert name.startswith((".", "demo/", "/")) or any(file.endswith(f"/{name}") for file in files), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tables_are_whole(page: Path) -> None:
    """A row without a header above it is shown as text."""
    text = page.read_text(encoding="utf-8")
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        rows = table.splitlines()
        assert len(rows) > 2, table
        assert re.fullmatch(r"\|[\s:|-]+\|", rows[1]), table
        cells = [re.sub(r"`[^`]*`", "", row).replace("\\|", "").count("|") for row in rows]
        assert cells == [cells[0]] * len(rows), table


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_have_these_options(page: Path, commands: dict[str, click.Command]) -> None:
    for words in typed(page.read_text(encoding="utf-8")):
        at = next((index for index, word in enumerate(words) if word in commands), None)
        if at is None:
            continue
        command, known = commands[words[at]], options(commands[words[at]])
        for word in words[at + 1 :]:
            if word == "--":
                break
            # Several may be named at once: ls|stat.
            below = [subcommand(command, each) for each in word.split("|")]
            if any(below):
                assert all(below), " ".join(words)
                command = below[0] or command
                known |= options(command)
            elif word.startswith("--"):
                assert word.partition("=")[0] in known, f"{word} in: {' '.join(words)}"


def first_column(page: str, header: str) -> list[str]:
    """Names in the first column of the table whose header line begins so."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {header}"))
    names: list[str] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        names += [name.strip(" `") for name in line.split("|")[1].split(",")]
    return names


def test_every_key_is_in_its_table() -> None:
    report = {field.name for field in fields(Report)}
    assert set(first_column("requests.md", "key of `report`")) == report
    assert set(first_column("policy.md", "key")) == set(ReusePolicy.model_fields)
    assert set(first_column("artifact-format.md", "key")) == {*Certificate.model_fields, "digest"}
    assert set(first_column("serving.md", "fault")) == {fault.value for fault in ServingFault}


def test_every_reason_to_recompute_is_named() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    assert {reason.value for reason in FallbackReason} <= set(re.findall(r"`(\w+)`", text))
