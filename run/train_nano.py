"""Trains the nano network of the examples: `python run/train_nano.py --help`. One command, one wall-clock budget."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import click
import torch
from transformers.utils import logging as transformers_logging

PROJECT = Path(__file__).resolve().parent.parent
# Machines that only train need not have the package installed.
sys.path.insert(0, str(PROJECT))

from trt_redknot.cli.command import run_command  # noqa: E402
from trt_redknot.cli.output import Output  # noqa: E402
from trt_redknot.errors import CheckpointError, LaunchError  # noqa: E402
from trt_redknot.evaluation.nano.card import model_card  # noqa: E402
from trt_redknot.evaluation.nano.network import SMALL, NanoSizes, round_to_checkpoint, write_checkpoint  # noqa: E402
from trt_redknot.evaluation.nano.scores import Scores, ablate, distance, score  # noqa: E402
from trt_redknot.evaluation.nano.training import Recipe, Trainer  # noqa: E402

STATE = "state.safetensors"
LOG = "log.jsonl"
CHECKPOINT = "checkpoint"
_SAVE_S = 90.0
_LOGGED_EVERY = 5


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  python run/train_nano.py --output work/nano --minutes 14 --device cuda --compile      the published checkpoint
  python run/train_nano.py --output work/nano --minutes 14 --device cuda --compile --pause-after 8
                                             stops after 8 minutes; the same command goes on where it stopped
  python run/train_nano.py --output work/tiny --small --steps 200 --tokens 2048         a few minutes on a CPU
""",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of checkpoint, state and log.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Training time over all resumptions.")
@click.option("--pause-after", type=click.FloatRange(0), help="Minutes after which this call saves its state and ends.")
@click.option("--steps", type=click.IntRange(1), default=4000, show_default=True, help="Most steps.")
@click.option("--tokens", type=click.IntRange(128), default=32768, show_default=True, help="Tokens of a batch.")
@click.option("--lengths", default="128,512,1024,2048", show_default=True, help="Sequence lengths of the stages.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=1.5e-3, show_default=True, help="Learning rate."
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="As torch names it.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the layer function, one graph a kind and length.")
@click.option("--workers", type=click.IntRange(0), default=4, show_default=True, help="Processes that make batches.")
@click.option("--small", is_flag=True, help="A network of half a million parameters, for a CPU.")
@click.option("--score-lengths", default="512,1024,2048,4096", show_default=True, help="Prompt lengths to score at.")
@click.option(
    "--score-prompts", type=click.IntRange(1), default=64, show_default=True, help="Prompts a kind and length."
)
def main(
    output: Path, minutes: float | None, pause_after: float | None, steps: int, tokens: int, lengths: str, rate: float,
    seed: int, device: str, compiled: bool, workers: int, small: bool, score_lengths: str, score_prompts: int,
) -> None:  # fmt: skip
    """Train the nano network, or go on with the state in the output folder; score it; write its checkpoint."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    out = Output()
    started = time.monotonic()
    stages = _numbers(lengths, "--lengths")
    recipe = Recipe(
        sizes=SMALL if small else NanoSizes(), seed=seed, steps=steps, minutes=minutes, lengths=stages,
        ends=_ends(len(stages)), tokens=tokens, rate=rate,
    )  # fmt: skip
    scored = _numbers(score_lengths, "--score-lengths")
    place = _device(device)
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    trainer = Trainer(recipe, place, compiled=compiled, workers=workers)
    state = output / STATE
    if state.is_file():
        trainer.load(state)
        out.note(f"going on at step {trainer.progress.step}, after {trainer.progress.seconds / 60:.1f} minutes")
    run = _Run(trainer=trainer, output=output, out=out, started=started, pause_after=pause_after)
    trainer.run(pause=run.pause, log=run.log)
    trainer.save(state)
    if not trainer.done:
        run.checkpoint({}, {})
        out.note(f"paused at step {trainer.progress.step}; the same command goes on")
        return
    round_to_checkpoint(trainer.model)
    apart = distance(trainer.network, min(scored), seed=seed, device=place)
    with out.progress("scoring", len(scored)) as advance:
        scores: Scores = {}
        for length in scored:
            scores |= score(
                trainer.network, [length], prompts=score_prompts, seed=seed, device=place,
                autocast=place.type == "cuda",
            )  # fmt: skip
            advance(1)
    with out.progress("leaving layers out", 1) as advance:
        ablation = ablate(
            trainer.network, min(scored), prompts=max(1, score_prompts // 4), seed=seed, device=place,
            autocast=place.type == "cuda",
        )  # fmt: skip
        advance(1)
    size = run.checkpoint(scores, ablation)
    out.json(
        {
            "checkpoint": str(output / CHECKPOINT),
            "bytes": size,
            "step": trainer.progress.step,
            "minutes": trainer.progress.seconds / 60,
            "logits_from_transformers": apart,
            "exact_match": scores,
            "exact_match_without_layer": ablation,
        }
    )


class _Run:
    """What happens beside training: the log, saved states, usable checkpoints, the pause."""

    def __init__(
        self, *, trainer: Trainer, output: Path, out: Output, started: float, pause_after: float | None
    ) -> None:
        self._trainer = trainer
        self._output = output
        self._out = out
        self._started = started
        self._pause_s = None if pause_after is None else 60 * pause_after
        self._saved = time.monotonic()
        self._lines = 0
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the output cannot be written: {error.strerror or error}", path=output) from error

    def log(self, values: dict[str, float]) -> None:
        with (self._output / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self._lines % _LOGGED_EVERY == 0:
            self._out.note(
                f"step {values['step']:5.0f}  length {values['length']:4.0f}  answers {values['answers']:.3f} "
                f"({values['correct']:.1%} right)  previous {values['previous_correct']:.1%}  "
                f"subject {values['subject_correct']:.1%}  indexer {values['indexer']:.3f}  {values['step_ms']:.0f} ms"
            )
        self._lines += 1

    def pause(self) -> bool:
        now = time.monotonic()
        if now - self._saved > _SAVE_S:
            self._trainer.save(self._output / STATE)
            self.checkpoint({}, {})
            self._saved = now
        return self._pause_s is not None and now - self._started > self._pause_s

    def checkpoint(self, scores: Scores, ablation: dict[str, float]) -> int:
        trainer = self._trainer
        recipe, progress = trainer.recipe.to_json(), trainer.progress
        content = {
            "recipe": recipe,
            "step": progress.step,
            "minutes": progress.seconds / 60,
            "exact_match": scores,
            "exact_match_without_layer": ablation,
        }
        card = model_card(
            command=" ".join(["python run/train_nano.py", *sys.argv[1:]]), recipe=recipe, step=progress.step,
            minutes=progress.seconds / 60, device=_device_name(trainer.device), scores=scores,
            ablation=ablation,
        )  # fmt: skip
        return write_checkpoint(trainer.model, self._output / CHECKPOINT, card, content)


def _ends(stages: int) -> tuple[float, ...]:
    """Every stage gets the same share, the last one half as much again."""
    share = 1.0 / (stages + 0.5)
    return (*(share * (index + 1) for index in range(stages - 1)), 1.0)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{option}: expected whole numbers with commas, found {text!r}.") from error
    if min(numbers) < 64:
        raise click.UsageError(f"{option}: expected 64 or more, found {min(numbers)}.")
    return numbers


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LaunchError("the device cannot be used", found=f"{name}: {str(error).splitlines()[0]}") from error
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    run_command(cast("Any", lambda: main(standalone_mode=False)))
