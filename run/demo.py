"""The main job on real input: a checkpoint becomes an engine, documents become artifacts, a question is answered
twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from trt_redknot.cli.command import run_command
from trt_redknot.cli.output import Output
from trt_redknot.errors import LaunchError
from trt_redknot.launch import mpirun_command, mpirun_environment

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLES = PROJECT / "examples"


def run(title: str, command: Sequence[str], out: Output) -> None:
    """Run one step; its output is the person's to see."""
    started = time.perf_counter()
    out.note(f"\n== {title}")
    finished = subprocess.run(command, cwd=PROJECT, env=mpirun_environment(), check=False)
    if finished.returncode:
        raise LaunchError(f"the step failed: {title}", found=f"exit status {finished.returncode}")
    out.note(f"   {time.perf_counter() - started:.1f} s")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path), default=PROJECT / "demo", help="Folder to work in.")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Tensor-parallel ranks.")
@click.option(
    "--question", "question_id", default="wind-limit-now", show_default=True, help="Of examples/questions.json."
)
def main(output: Path, ranks: int, question_id: str) -> None:
    """Build an engine and artifacts from the example documents, then answer a question in both arms."""
    out = Output()
    questions = {item["id"]: item for item in json.loads((EXAMPLES / "questions.json").read_text())["questions"]}
    if question_id not in questions:
        raise click.UsageError(f"--question: expected one of {', '.join(questions)}, found {question_id}.")
    question = questions[question_id]
    documents = [str(EXAMPLES / "documents" / name) for name in question["documents"]]
    # The engine is made anew each time; the store stays, so a second run finds its artifacts.
    for folder in ("checkpoint", "engine"):
        shutil.rmtree(output / folder, ignore_errors=True)
    run(
        "a small DeepSeek-V4 checkpoint with seeded random weights (transformers writes it)",
        [sys.executable, str(EXAMPLES / "make_checkpoint.py"), "--output", str(output / "checkpoint")],
        out,
    )
    run(
        f"an engine for {ranks} ranks",
        mpirun_command(
            ranks,
            ["build_engine.py", "--checkpoint", str(output / "checkpoint"), "--output", str(output / "engine")],
        ),
        out,
    )
    places = ["--engine", str(output / "engine"), "--store", str(output / "store")]
    run(
        "artifacts of the documents",
        mpirun_command(ranks, ["-m", "trt_redknot", "artifacts", "build", *places, *documents]),
        out,
    )
    page = output / "report.html"
    asked = ["--question", question["question"], "--page", str(page)]
    run(
        f"the question in both arms: {question['question']}",
        mpirun_command(ranks, ["run/compare.py", *places, *asked, *documents]),
        out,
    )
    out.note(
        f"\nThe network has random weights: its words mean nothing, the arms can be compared all the same.\n"
        f"Look at {page}: the row map of the request, layer by layer, and what was saved."
    )


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
