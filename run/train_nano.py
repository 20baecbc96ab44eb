"""Trains the nano network of the examples: `python run/train_nano.py --help`. One command, one wall-clock budget."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

PROJECT = Path(__file__).resolve().parent.parent
# Machines that only train need not have the package installed.
sys.path.insert(0, str(PROJECT))

from trt_redknot.cli.command import run_command  # noqa: E402
from trt_redknot.cli.numbers import FiniteRange  # noqa: E402
from trt_redknot.cli.output import Output  # noqa: E402
from trt_redknot.errors import CheckpointError, LaunchError  # noqa: E402

if TYPE_CHECKING:
    import torch

    from trt_redknot.evaluation.nano.card import TrainingRun
    from trt_redknot.evaluation.nano.scores import Scores
    from trt_redknot.evaluation.nano.training import Trainer

STATE = "state.safetensors"
LOG = "log.jsonl"
CHECKPOINT = "checkpoint"
_SAVE_S = 90.0
_STEPS = 4000


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  python run/train_nano.py --output work/nano --minutes 9.5 --device cuda --compile     the first of its four runs
  python run/train_nano.py --output work/nano --minutes 14 --device cuda --pause-after 8
                                             stops after 8 minutes; the same command goes on where it stopped
  python run/train_nano.py --output work/tiny --small --steps 200 --tokens 2048         a few minutes on a CPU
""",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of checkpoint, state and log.")
@click.option("--minutes", type=FiniteRange(0, min_open=True), help="Training time over all resumptions.")
@click.option("--pause-after", type=FiniteRange(0), help="Minutes after which this call saves its state and ends.")
@click.option("--start", type=click.Path(path_type=Path), help="Checkpoint to begin with. Left out: random weights.")
@click.option("--copy", "copied", type=click.IntRange(0), nargs=2, metavar="LAYER OTHER",
              help="Begin with LAYER's attention in OTHER too, so that both read.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Most steps. Left out: 4000, or with --minutes no limit.")
@click.option("--tokens", type=click.IntRange(128), default=32768, show_default=True, help="Tokens of a batch.")
@click.option("--lengths", default="128,512,1024,2048", show_default=True, help="Sequence lengths of the stages.")
@click.option("--first", type=FiniteRange(0, 1, min_open=True), default=0.2, show_default=True,
              help="Share of the run after which the first stage ends at the latest.")  # fmt: skip
@click.option("--rate", type=FiniteRange(0, min_open=True), default=1.5e-3, show_default=True, help="Learning rate.")
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="As torch names it.")
@click.option("--compile", "compiled", is_flag=True, help="Compile what works row by row; once for all lengths.")
@click.option("--no-capture", is_flag=True, help="Launch every operation anew instead of replaying a CUDA graph.")
@click.option("--workers", type=click.IntRange(0), default=4, show_default=True, help="Processes that make batches.")
@click.option("--read-early", is_flag=True, help="Let layer 2 read entries too: it then answers inside the fence.")
@click.option("--small", is_flag=True, help="A network of half a million parameters, for a CPU.")
@click.option("--score-lengths", default="512,1024,2048,4096", show_default=True, help="Prompt lengths to score at.")
@click.option(
    "--score-prompts", type=click.IntRange(1), default=64, show_default=True, help="Prompts a kind and length."
)
def main(
    output: Path, minutes: float | None, pause_after: float | None, start: Path | None,
    copied: tuple[int, int] | None, steps: int | None, tokens: int, lengths: str, first: float, rate: float, seed: int,
    device: str, compiled: bool, no_capture: bool, workers: int, read_early: bool, small: bool, score_lengths: str,
    score_prompts: int,
) -> None:  # fmt: skip
    """Train the nano network, or go on with the state in the output folder; score it; write its checkpoint."""
    import torch
    from transformers.utils import logging as transformers_logging

    from trt_redknot.evaluation.nano.card import earlier_runs
    from trt_redknot.evaluation.nano.lean import LeanNetwork
    from trt_redknot.evaluation.nano.network import SMALL, NanoSizes, round_to_checkpoint
    from trt_redknot.evaluation.nano.scores import ablate, distance, score
    from trt_redknot.evaluation.nano.training import Recipe, Trainer

    transformers_logging.disable_progress_bar()
    out = Output()
    started = time.monotonic()
    stages = _numbers(lengths, "--lengths")
    if steps is None and minutes is None:
        steps = _STEPS
    sizes = SMALL if small else NanoSizes()
    recipe = Recipe(
        sizes=sizes, start=None if start is None else str(start), copied=copied, seed=seed, steps=steps,
        minutes=minutes, lengths=stages, first=first, tokens=tokens, rate=rate,
    )  # fmt: skip
    if read_early:
        recipe = replace(recipe, sizes=replace(sizes, silent=()), reading_layers=(2, 4))
    scored = _numbers(score_lengths, "--score-lengths")
    ablated = scored[len(scored) // 2]
    place = _device(device)
    if place.type == "cuda":
        torch.set_float32_matmul_precision("high")
    trainer = Trainer(recipe, place, compiled=compiled, captured=not no_capture, workers=workers, note=out.note)
    state = output / STATE
    if state.is_file():
        trainer.load(state)
        out.note(f"going on at step {trainer.progress.step}, after {trainer.progress.seconds / 60:.1f} minutes")
    run = _Run(
        trainer=trainer, earlier=[] if start is None else earlier_runs(start), output=output, out=out, started=started,
        pause_after=pause_after, ablated=ablated,
    )  # fmt: skip
    trainer.run(pause=run.pause, log=run.log)
    trainer.save(state)
    if trainer.done:
        round_to_checkpoint(trainer.model)
    run.checkpoint({}, {})
    if not trainer.done:
        out.note(f"paused at step {trainer.progress.step}; the same command goes on")
        return
    # Without compilation: prompts come in many shapes.
    network = LeanNetwork(trainer.model, silent=recipe.sizes.silent)
    on_gpu = place.type == "cuda"
    with out.progress("scoring", len(scored)) as advance:
        scores: Scores = {}
        for length in scored:
            scores |= score(network, [length], prompts=score_prompts, seed=seed, device=place, autocast=on_gpu)
            out.note(
                f"{length} tokens: " + "  ".join(f"{kind} {share:.1%}" for kind, share in scores[str(length)].items())
            )
            advance(1)
    with out.progress("leaving layers out", 1) as advance:
        ablation = ablate(
            network,
            ablated,
            prompts=max(1, score_prompts // 4),
            seed=seed,
            device=place,
            autocast=on_gpu,
        )
        advance(1)
    run.checkpoint(scores, ablation)
    apart = distance(network, min(scored), seed=seed, device=place)
    out.json(
        {
            "checkpoint": str(output / CHECKPOINT),
            "bytes": sum(path.stat().st_size for path in (output / CHECKPOINT).glob("*.safetensors")),
            "step": trainer.progress.step,
            "minutes": trainer.progress.seconds / 60,
            "logits_from_transformers": apart,
            "exact_match": scores,
            "exact_match_changed": ablation,
        }
    )


class _Run:
    """What happens beside training: the log, saved states, usable checkpoints, the pause."""

    def __init__(
        self, *, trainer: Trainer, earlier: list[TrainingRun], output: Path, out: Output, started: float,
        pause_after: float | None, ablated: int,
    ) -> None:  # fmt: skip
        self._trainer = trainer
        self._earlier = earlier
        self._output = output
        self._out = out
        self._started = started
        self._ablated = ablated
        self._pause_s = None if pause_after is None else 60 * pause_after
        self._saved = time.monotonic()
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the output cannot be written: {error.strerror or error}", path=output) from error

    def log(self, values: dict[str, float]) -> None:
        with (self._output / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        found = "  ".join(
            f"{key.removeprefix('found_')} {value:.0%}" for key, value in values.items() if key.startswith("found_")
        )
        self._out.note(
            f"step {values['step']:5.0f}  length {values['length']:4.0f}  {values['step_ms']:4.0f} ms  "
            f"loss {values['total']:.3f}  answers {values['answers']:.3f} ({values['correct']:.1%} right)  "
            f"previous {values['previous_correct']:.1%}  subject {values['subject_correct']:.1%}  "
            f"bridge {values['bridge_correct']:.1%}  told {values['told_correct']:.1%}  "
            f"late {values['late_correct']:.1%}  indexer {values['indexer']:.3f}  found: {found}"
        )

    def pause(self) -> bool:
        now = time.monotonic()
        if now - self._saved > _SAVE_S:
            self._trainer.save(self._output / STATE)
            self.checkpoint({}, {})
            self._saved = now
        return self._pause_s is not None and now - self._started > self._pause_s

    def checkpoint(self, scores: Scores, ablation: dict[str, float]) -> int:
        from trt_redknot.evaluation.nano.card import TrainingRun, model_card
        from trt_redknot.evaluation.nano.network import write_checkpoint

        trainer = self._trainer
        recipe, progress = trainer.recipe, trainer.progress
        run = TrainingRun(
            command=" ".join(["python run/train_nano.py", *sys.argv[1:]]), device=_device_name(trainer.device),
            seed=recipe.seed, tokens=recipe.tokens, lengths=recipe.lengths, steps=progress.step,
            minutes=progress.seconds / 60,
        )  # fmt: skip
        runs = [*self._earlier, run]
        content = {
            "runs": [asdict(run) for run in runs],
            "recipe": recipe.to_json(),
            "exact_match": scores,
            "exact_match_changed": ablation,
        }
        card = model_card(runs=runs, recipe=recipe.to_json(), scores=scores, ablation=ablation, ablated=self._ablated)
        return write_checkpoint(trainer.model, self._output / CHECKPOINT, card, content)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.UsageError(f"{option}: expected whole numbers with commas, found {text!r}.") from error
    if min(numbers) < 64:
        raise click.UsageError(f"{option}: expected 64 or more, found {min(numbers)}.")
    return numbers


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LaunchError("the device cannot be used", found=f"{name}: {str(error).splitlines()[0]}") from error
    return device


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    run_command(cast("Any", lambda: main(standalone_mode=False)))
