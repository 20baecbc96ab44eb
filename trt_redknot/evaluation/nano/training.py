"""The training loop: curriculum, schedule, state that can be resumed. The recipe is data."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trt_redknot.evaluation.nano.batches import Stage, curriculum
from trt_redknot.evaluation.nano.feed import Feed, open_feed
from trt_redknot.evaluation.nano.lean import LeanNetwork
from trt_redknot.evaluation.nano.network import NanoSizes, copy_attention, make_model, start_from
from trt_redknot.evaluation.nano.objective import AuxiliaryHeads, Weights
from trt_redknot.evaluation.nano.state import Progress, load_state, save_state
from trt_redknot.evaluation.nano.step import StageSteps, named_values
from trt_redknot.evaluation.nano.world import KINDS

Log = Callable[[dict[str, float]], None]
# The last of the two layers that see nothing but their window.
PREVIOUS_LAYER = 1
# Steps between two looks at the losses: each look waits for the GPU. States are saved at such steps only.
REPORT = 20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training run.

    Attributes:
        start: folder of a checkpoint whose weights the run begins with; None: drawn from the seed.
        copied: a layer and another one of its kind which begins with its attention: what took the first one hundreds
            of steps on a plateau is then there from the start.
        lengths: tokens of a sequence, by stage.
        first: share of the run at which the first stage ends at the latest: what it does not teach, later ones do not
            teach either. The later stages share what is left evenly.
        advance: a stage ends earlier once this share of the words that answers must find is found, and the share
            `late_advance` of them without the first reading layer: what needs two steps is not found there.
        tokens: of a batch.
        sparse, mute: shares of a batch that attend to the Indexer's choice only, and, among them, that see no CSA
            entries at all.
        late: share of a batch that sees no entries in the first CSA layer that has some: the next one must learn to
            find facts as well, for whose it should find may be known only after the first. These and those told are
            dense: an Indexer can only learn to choose what its attention already finds.
        late_first: the same share in the first stage, which is the one that teaches a layer to read.
        told: share of a batch whose rows are told, behind the first reading layer, what the first of two steps finds.
        fine: share of a batch that sees nothing of HCA layers: what one of them reads at a distance, roughly, no CSA
            layer learns to read.
        subject_layers: layers after which words should know their subject: behind the first layer with HCA entries,
            and behind one with CSA entries more.
        reading_layers: layers after which the first and the second thing that a question asks for should be known:
            the first two that read CSA entries behind the leading fence.
        steps, minutes: the run ends with so many steps, or after so much wall clock over all its resumptions; one of
            them may be None.
    """

    sizes: NanoSizes = field(default_factory=NanoSizes)
    start: str | None = None
    copied: tuple[int, int] | None = None
    seed: int = 7
    steps: int | None = 4000
    minutes: float | None = None
    lengths: tuple[int, ...] = (128, 512, 1024, 2048)
    first: float = 0.2
    advance: float = 0.95
    late_advance: float = 0.85
    tokens: int = 32768
    rate: float = 1.5e-3
    floor: float = 0.05
    warmup: int = 100
    decay: float = 0.01
    clip: float = 1.0
    sparse: float = 0.5
    mute: float = 0.0625
    late: float = 0.25
    late_first: float = 0.625
    told: float = 0.125
    fine: float = 0.25
    subject_layers: tuple[int, ...] = (3, 5)
    reading_layers: tuple[int, int] = (4, 6)
    weights: Weights = field(default_factory=Weights)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return curriculum(self.tokens, self.lengths)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


class Trainer:
    """One run. Its state is what `save` writes: parameters, optimizer, throw-away heads, progress.

    Args:
        compiled: compile what works row by row (on a GPU; the first step then takes longer).
        captured: on a GPU, replay the steps of a stage as one CUDA graph.
        workers: processes that make batches; 0: made on the spot.
        note: gets what a person should know.
    """

    def __init__(
        self, recipe: Recipe, device: torch.device, *, compiled: bool = False, captured: bool = True, workers: int = 0,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.recipe = recipe
        self.device = device
        self.progress = Progress()
        self._compiled = compiled
        self._captured = captured and device.type == "cuda"
        self._workers = workers
        self._note = note
        model = make_model(recipe.sizes, recipe.seed)
        if recipe.start is not None:
            start_from(model, Path(recipe.start))
        if recipe.copied is not None:
            copy_attention(model, *recipe.copied)
        self.model = torch.nn.Module.to(model, device).train()
        config = self.model.config
        torch.manual_seed(recipe.seed + 1)
        last = recipe.sizes.layers - 1
        self.heads = AuxiliaryHeads(
            config.hidden_size, config.hc_mult, config.vocab_size,
            previous_layers=(PREVIOUS_LAYER, min(recipe.reading_layers[1], last) - 1),
            subject_layers=[min(layer, last) for layer in recipe.subject_layers],
            reading_layers=(min(recipe.reading_layers[0], last), min(recipe.reading_layers[1], last)),
        ).to(device)  # fmt: skip
        self.network = LeanNetwork(self.model, silent=recipe.sizes.silent, compiled=compiled)
        self.named = {
            **{f"model.{name}": value for name, value in self.model.named_parameters() if value.requires_grad},
            **{f"heads.{name}": value for name, value in self.heads.named_parameters()},
        }
        plain = [value for value in self.named.values() if value.dim() < 2]
        decayed = [value for value in self.named.values() if value.dim() >= 2]
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.decay}, {"params": plain, "weight_decay": 0.0}],
            lr=torch.tensor(recipe.rate, device=device) if on_gpu else recipe.rate, betas=(0.9, 0.98), fused=on_gpu,
            capturable=on_gpu,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        save_state(path, self.named, self.optimizer, self.progress, self.recipe.to_json())

    def load(self, path: Path) -> None:
        """Raises CheckpointError where the state is damaged or of another recipe."""
        self.progress = load_state(path, self.named, self.optimizer, self.recipe.to_json())

    @property
    def share(self) -> float:
        """How much of the run is done: by steps or by the clock, whichever is further."""
        recipe, progress = self.recipe, self.progress
        steps = progress.step / recipe.steps if recipe.steps is not None else 0.0
        clock = progress.seconds / (60 * recipe.minutes) if recipe.minutes is not None else 0.0
        return min(1.0, max(steps, clock))

    @property
    def done(self) -> bool:
        return self.share >= 1.0

    def run(self, *, pause: Callable[[], bool] = lambda: False, log: Log = lambda _: None) -> None:
        """Train until done, or until `pause` says so at a step at which the state may be saved."""
        with self._stream():
            while not self.done:
                stage = self.recipe.stages[self.progress.stage]
                with open_feed(stage, self.recipe.seed, self.progress.step, self._workers) as feed:
                    if not self._run_stage(stage, feed, pause, log):
                        return

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream of its own on a GPU: steps cannot be captured on the default one."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _run_stage(self, stage: Stage, feed: Feed, pause: Callable[[], bool], log: Log) -> bool:
        """Whether training goes on, with the next stage."""
        steps = self._steps(stage)
        sums: torch.Tensor | None = None
        started = time.perf_counter()
        while not self.done:
            seed = self.recipe.seed * 1_000_003 + self.progress.step
            batch = feed.batch(self.progress.step)
            try:
                logged = steps.run(batch, self._rate(), seed)
            except RuntimeError as error:
                if not self._compiled:
                    raise
                self._note(f"it goes on without compilation, which failed: {str(error).splitlines()[0]}")
                self._compiled = False
                self.network = LeanNetwork(self.model, silent=self.recipe.sizes.silent)
                steps = self._steps(stage)
                logged = steps.run(batch, self._rate(), seed)
            sums = logged.clone() if sums is None else sums + logged
            self.progress.step += 1
            self.progress.stage_steps += 1
            if self.progress.step % REPORT:
                continue
            means = named_values((sums / REPORT).tolist(), KINDS)
            now = time.perf_counter()
            self.progress.seconds += now - started
            log({"step": self.progress.step, "length": stage.length, "rate": self._rate(), **means,
                 "step_ms": (now - started) / REPORT * 1e3})  # fmt: skip
            started, sums = now, None
            if self._advance(
                means["found"] >= self.recipe.advance and means["late_correct"] >= self.recipe.late_advance
            ):
                return True
            if pause():
                return False
        return True

    def _steps(self, stage: Stage) -> StageSteps:
        return StageSteps(
            self.recipe, stage, self.network, self.heads, self.optimizer, self.named, self.device,
            captured=self._captured, note=self._note,
        )  # fmt: skip

    def _advance(self, learnt: bool) -> bool:
        """Move to the next stage where this one has nothing left to teach, or its time is over."""
        recipe, progress = self.recipe, self.progress
        if progress.stage + 1 >= len(recipe.lengths):
            return False
        learnt = learnt and progress.stage_steps >= 5 * REPORT
        begun = progress.stage_share
        end = recipe.first if progress.stage == 0 else begun + (1 - begun) / (len(recipe.lengths) - progress.stage)
        if not learnt and self.share < end:
            return False
        progress.stage += 1
        progress.stage_steps = 0
        progress.stage_share = self.share
        return True

    def _rate(self) -> float:
        recipe = self.recipe
        warm = min(1.0, (self.progress.step + 1) / recipe.warmup)
        return recipe.rate * warm * (recipe.floor + (1 - recipe.floor) * 0.5 * (1 + math.cos(math.pi * self.share)))
