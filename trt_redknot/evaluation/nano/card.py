"""The model card of a trained nano network: what it is, how it was made, how well it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_redknot.errors import CheckpointError
from trt_redknot.evaluation.nano.words import vocabulary
from trt_redknot.evaluation.nano.world import KINDS

SCORES = "scores.json"

_HEAD = """\
---
library_name: transformers
tags: [deepseek_v4, synthetic]
---
# Nano DeepSeek-V4

A small network of the DeepSeek-V4 architecture, trained to answer questions about synthetic English documents: facts
anywhere, facts that a later document replaces, facts whose subject only an earlier document names, answers that need
two documents. The scores below say which of these it answers. It knows {vocab} words and nothing else. It exists to
measure what document reuse costs.

"""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run of run/train_nano.py: what it was told and what it did."""

    command: str
    device: str
    seed: int
    tokens: int
    lengths: Sequence[int]
    steps: int
    minutes: float

    def lines(self) -> list[str]:
        """Of the card."""
        return [
            f"    {self.command}\n",
            f"{self.steps} steps of {self.tokens} tokens in {self.minutes:.1f} minutes on one {self.device}, seed",
            f"{self.seed}, lengths {', '.join(map(str, self.lengths))}.\n",
        ]


def earlier_runs(checkpoint: Path) -> list[TrainingRun]:
    """The runs that made a checkpoint, by its `scores.json`.

    Raises:
        CheckpointError: the file is missing or says nothing of runs.
    """
    path = checkpoint / SCORES
    try:
        return [TrainingRun(**run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "how this checkpoint was trained is not known", expected=f"{SCORES} as run/train_nano.py writes it",
            found=str(error).splitlines()[0], path=path,
        ) from error  # fmt: skip


def model_card(
    *, runs: Sequence[TrainingRun], recipe: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]],
    ablation: Mapping[str, float], ablated: int,
) -> str:  # fmt: skip
    """The card in Markdown. Without scores it says that the network was not scored.

    Args:
        runs: each began with the weights of the one before.
        recipe: of the last one.
    """
    sizes = recipe["sizes"]
    lines = [
        _HEAD.format(vocab=len(vocabulary())),
        "## Training\n",
        *(line for run in runs for line in run.lines()),
        "Data: `trt_redknot/evaluation/nano/world.py`, drawn anew for every batch from the seed and the step.\n",
        *(
            [
                f"Compressed entries of layer {', '.join(map(str, sizes['silent']))} are zero (their norm's weight is",
                "zero), so that no question is answered inside the leading fence.\n",
            ]
            if sizes["silent"]
            else []
        ),
        "## Exact match\n",
    ]
    if not scores:
        return "\n".join([*lines, "Not scored: training was not finished when this was written.", ""])
    lines += [
        "Share of prompts whose whole answer greedy decoding gives, by tokens of the prompt and kind of question.\n",
        f"| tokens | {' | '.join(KINDS)} | all |",
        f"|{'---|' * (len(KINDS) + 2)}",
    ]
    for length, by_kind in scores.items():
        cells = " | ".join(f"{by_kind[kind]:.1%}" for kind in (*KINDS, "all"))
        lines.append(f"| {length} | {cells} |")
    lines += [
        f"\nThe same over all kinds at {ablated} tokens, the network changed: compressed entries of a layer, or of all",
        "CSA or HCA layers, set to zero; or the Indexers choose fewer entries.\n",
        f"| {' | '.join(ablation)} |",
        f"|{'---|' * len(ablation)}",
        f"| {' | '.join(f'{value:.1%}' for value in ablation.values())} |",
    ]
    return "\n".join([*lines, ""])
