"""The model card of a trained nano network: what it is, how it was made, how well it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_redknot.evaluation.nano.words import vocabulary
from trt_redknot.evaluation.nano.world import KINDS

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


def model_card(
    *, command: str, recipe: Mapping[str, Any], step: int, minutes: float, device: str,
    scores: Mapping[str, Mapping[str, float]], ablation: Mapping[str, float], ablated: int,
) -> str:  # fmt: skip
    """The card in Markdown. Without scores it says that the network was not scored."""
    sizes = recipe["sizes"]
    lines = [
        _HEAD.format(vocab=len(vocabulary())),
        "## Training\n",
        f"    {command}\n",
        f"{step} steps of {recipe['tokens']} tokens in {minutes:.1f} minutes on one {device}, seed {recipe['seed']}.",
        f"Lengths {', '.join(map(str, recipe['lengths']))}. Data: `trt_redknot/evaluation/nano/world.py`, drawn anew",
        "for every batch from the seed and the step.\n",
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
