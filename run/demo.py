"""The main job on real input: a checkpoint becomes an engine, documents become artifacts, a question is answered
twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import click

from trt_redknot.cli.command import run_command
from trt_redknot.cli.output import Output
from trt_redknot.config.parse import load_geometry
from trt_redknot.engine.manifest import MANIFEST
from trt_redknot.errors import LaunchError
from trt_redknot.launch import mpirun_command, mpirun_environment

PROJECT = Path(__file__).resolve().parent.parent
NANO = PROJECT / "examples" / "nano"
QUESTIONS = NANO / "questions.json"


def run(title: str, command: Sequence[str], out: Output) -> None:
    """Run one step; its output is the person's to see."""
    started = time.perf_counter()
    out.note(f"\n== {title}")
    finished = subprocess.run(command, cwd=PROJECT, env=mpirun_environment(), check=False)
    if finished.returncode:
        raise LaunchError(f"the step failed: {title}", found=f"exit status {finished.returncode}")
    out.note(f"   {time.perf_counter() - started:.1f} s")


def remove_engine(folder: Path) -> None:
    """Remove the engine of an earlier demo. Raises LaunchError for what is none: it may have taken hours to build."""
    if not os.path.lexists(folder):
        return
    try:
        found = json.loads((folder / MANIFEST).read_bytes())["geometry_digest"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found != load_geometry(NANO / "checkpoint").digest:
        raise LaunchError(
            "the folder holds something else than an engine of the demo", path=folder,
            remedy="Name another --output, or remove it.",
        )  # fmt: skip
    shutil.rmtree(folder)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path), default=PROJECT / "demo", help="Folder to work in.")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Tensor-parallel ranks.")
@click.option(
    "--kind", default="continued", show_default=True, help="Kind of question, of examples/nano/questions.json."
)
def main(output: Path, ranks: int, kind: str) -> None:
    """Build an engine of the trained nano checkpoint and artifacts of its documents, then answer in both arms."""
    out = Output()
    questions = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    if kind not in questions:
        raise click.UsageError(f"--kind: expected one of {', '.join(questions)}, found {kind}.")
    question, answer = questions[kind]["question"], questions[kind]["answer"]
    documents = [str(path) for path in sorted((NANO / "documents").glob("*.txt"))]
    # The steps run in the project's folder.
    output = output.absolute()
    # The engine is made anew each time; the store stays, so a second run finds its artifacts.
    remove_engine(output / "engine")
    build = ["build_engine.py", "--checkpoint", str(NANO / "checkpoint"), "--output", str(output / "engine")]
    run(f"an engine of the nano checkpoint for {ranks} ranks", mpirun_command(ranks, build), out)
    places = ["--engine", str(output / "engine"), "--store", str(output / "store")]
    run(
        "artifacts of the documents",
        mpirun_command(ranks, ["-m", "trt_redknot", "artifacts", "build", *places, *documents]),
        out,
    )
    page = output / "report.html"
    asked = ["--question", question, "--page", str(page)]
    run(f"in both arms: {question}", mpirun_command(ranks, ["run/compare.py", *places, *asked, *documents]), out)
    out.note(
        f"\nThe documents say: {answer}.\n"
        f"Look at {page}: the row map of the request, layer by layer, and what was saved.\n"
        f"Other questions: --kind {', '.join(other for other in questions if other != kind)}."
    )


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
