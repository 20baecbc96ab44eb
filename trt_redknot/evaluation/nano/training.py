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
from trt_redknot.evaluation.nano.network import NanoSizes, make_model
from trt_redknot.evaluation.nano.objective import AuxiliaryHeads, Losses, Weights, losses_of
from trt_redknot.evaluation.nano.state import Progress, load_state, save_state

Log = Callable[[dict[str, float]], None]
# Steps between two looks at the losses: each look waits for the GPU. States are saved at such steps only.
REPORT = 20
_PARTS = ("answers", "previous", "subject", "indexer", "correct", "previous_correct", "subject_correct")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training run.

    Attributes:
        lengths, ends: tokens of a sequence by stage, and the share of the run at which each stage ends at the latest.
        advance: a stage ends earlier once this share of answer tokens is right.
        tokens: of a batch.
        sparse, mute: shares of a batch that attend to the Indexer's choice only, and that see no CSA entries at all.
        subject_layer: the layer after which words know their subject.
        minutes: wall clock of the whole run, over all its resumptions; None: `steps` alone decide.
    """

    sizes: NanoSizes = field(default_factory=NanoSizes)
    seed: int = 7
    steps: int = 4000
    minutes: float | None = None
    lengths: tuple[int, ...] = (128, 512, 1024, 2048)
    ends: tuple[float, ...] = (0.2, 0.45, 0.7, 1.0)
    advance: float = 0.97
    tokens: int = 32768
    rate: float = 1.5e-3
    floor: float = 0.05
    warmup: int = 100
    decay: float = 0.01
    clip: float = 1.0
    sparse: float = 0.5
    mute: float = 0.15
    subject_layer: int = 4
    weights: Weights = field(default_factory=Weights)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return curriculum(self.tokens, self.lengths)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


class Trainer:
    """One run. Its state is what `save` writes: parameters, optimizer, throw-away heads, progress.

    Args:
        compiled: compile the layer function (a GPU; the first step of every stage then takes a minute or two).
        workers: processes that make batches; 0: made on the spot.
    """

    def __init__(self, recipe: Recipe, device: torch.device, *, compiled: bool = False, workers: int = 0) -> None:
        self.recipe = recipe
        self.device = device
        self.progress = Progress()
        self._workers = workers
        self.model = torch.nn.Module.to(make_model(recipe.sizes, recipe.seed), device).train()
        config = self.model.config
        torch.manual_seed(recipe.seed + 1)
        self.heads = AuxiliaryHeads(
            config.hidden_size, config.hc_mult, config.vocab_size, min(recipe.subject_layer, recipe.sizes.layers - 1)
        ).to(device)
        self.network = LeanNetwork(self.model, compiled=compiled)
        self.named = {
            **{f"model.{name}": value for name, value in self.model.named_parameters() if value.requires_grad},
            **{f"heads.{name}": value for name, value in self.heads.named_parameters()},
        }
        plain = [value for value in self.named.values() if value.dim() < 2]
        decayed = [value for value in self.named.values() if value.dim() >= 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.decay}, {"params": plain, "weight_decay": 0.0}],
            lr=recipe.rate, betas=(0.9, 0.98), fused=device.type == "cuda",
        )  # fmt: skip

    def save(self, path: Path) -> None:
        save_state(path, self.named, self.optimizer, self.progress, self.recipe.to_json())

    def load(self, path: Path) -> None:
        """Raises CheckpointError where the state is damaged or of another recipe."""
        self.progress = load_state(path, self.named, self.optimizer, self.recipe.to_json())

    @property
    def share(self) -> float:
        """How much of the run is done: by steps or by the clock, whichever is further."""
        clock = 0.0
        if self.recipe.minutes is not None:
            clock = self.progress.seconds / (60 * self.recipe.minutes)
        return min(1.0, max(self.progress.step / self.recipe.steps, clock))

    @property
    def done(self) -> bool:
        return self.share >= 1.0

    def run(self, *, pause: Callable[[], bool] = lambda: False, log: Log = lambda _: None) -> None:
        """Train until done, or until `pause` says so at a step at which the state may be saved."""
        with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
            while not self.done:
                with self._feed() as (stage, feed):
                    if not self._run_stage(stage, feed, pause, log):
                        return

    @contextmanager
    def _feed(self) -> Iterator[tuple[Stage, Feed]]:
        stage = self.recipe.stages[self.progress.stage]
        with open_feed(stage, self.recipe.seed, self.progress.step, self._workers) as feed:
            yield stage, feed

    def _run_stage(self, stage: Stage, feed: Feed, pause: Callable[[], bool], log: Log) -> bool:
        """Whether training goes on, with the next stage."""
        sums: torch.Tensor | None = None
        started = time.perf_counter()
        while not self.done:
            losses = self._step(stage, feed)
            parts = torch.stack([getattr(losses, part).float() for part in _PARTS])
            sums = parts if sums is None else sums + parts
            self.progress.step += 1
            self.progress.stage_steps += 1
            if self.progress.step % REPORT:
                continue
            means = dict(zip(_PARTS, (sums / REPORT).tolist(), strict=True))
            now = time.perf_counter()
            self.progress.seconds += now - started
            log({"step": self.progress.step, "length": stage.length, "rate": self._rate(), **means,
                 "step_ms": (now - started) / REPORT * 1e3})  # fmt: skip
            started, sums = now, None
            if self._advance(means["correct"]):
                return True
            if pause():
                return False
        return True

    def _advance(self, correct: float) -> bool:
        """Move to the next stage where this one has nothing left to teach, or its time is over."""
        recipe, progress = self.recipe, self.progress
        if progress.stage + 1 >= len(recipe.lengths):
            return False
        learnt = correct >= recipe.advance and progress.stage_steps >= 5 * REPORT
        if not learnt and self.share < recipe.ends[progress.stage]:
            return False
        progress.stage += 1
        progress.stage_steps = 0
        return True

    def _rate(self) -> float:
        recipe = self.recipe
        warm = min(1.0, (self.progress.step + 1) / recipe.warmup)
        return recipe.rate * warm * (recipe.floor + (1 - recipe.floor) * 0.5 * (1 + math.cos(math.pi * self.share)))

    def _step(self, stage: Stage, feed: Feed) -> Losses:
        recipe = self.recipe
        batch = feed.batch(self.progress.step)
        tokens, targets, subjects = (
            torch.from_numpy(array).to(self.device, torch.int64, non_blocking=True)
            for array in (batch.tokens.copy(), batch.targets.copy(), batch.subjects.copy())
        )
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.progress.step)
        draw = torch.rand(stage.sequences, generator=generator).to(self.device)
        sparse, mute = draw < recipe.sparse, draw >= 1 - recipe.mute
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            forward = self.network(tokens, sparse=sparse, mute=mute, keep=self.heads.layers)
            losses = losses_of(
                forward, self.heads, tokens, targets, subjects, weights=recipe.weights, silent=recipe.sizes.silent,
                dense=~sparse,
            )  # fmt: skip
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(list(self.named.values()), recipe.clip)
        self.optimizer.step()
        return losses
