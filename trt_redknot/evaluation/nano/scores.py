"""How many questions a network answers exactly, by length and kind, with the Indexer's real choice everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from trt_redknot.evaluation.nano.lean import LeanNetwork
from trt_redknot.evaluation.nano.prompts import make_prompt
from trt_redknot.evaluation.nano.words import PAD, token_ids
from trt_redknot.evaluation.nano.world import KINDS

Scores = dict[str, dict[str, float]]
# Rows of one forward: bounds its memory.
_ROWS = 32768
_ROUND = 64
_FEWER = (2, 4, 8)


@torch.no_grad()
def score(
    network: LeanNetwork, lengths: Sequence[int], *, prompts: int, seed: int, device: torch.device, autocast: bool
) -> Scores:
    """Exact match by length and kind: `prompts` prompts each, and over all of a length as `all`.

    The answer is judged as greedy decoding would give it: every token, the end included, is the most likely one after
    the tokens before it.
    """
    network.model.eval()
    result: Scores = {}
    for length in lengths:
        by_kind: dict[str, float] = {}
        for kind in KINDS:
            rng = random.Random(f"{seed}/scores/{length}/{kind}")
            right = []
            size = max(1, _ROWS // length)
            for start in range(0, prompts, size):
                right += _exact(network, kind, length, min(size, prompts - start), rng, device, autocast)
            by_kind[kind] = sum(right) / len(right)
        result[str(length)] = {**by_kind, "all": sum(by_kind.values()) / len(by_kind)}
    network.model.train()
    return result


@torch.no_grad()
def distance(network: LeanNetwork, length: int, *, seed: int, device: torch.device) -> float:
    """Median over rows of the largest difference between this forward's fp32 logits and those of transformers.

    The median, because rounding may decide a near tie of a router or the Indexer otherwise in a few rows.
    """
    network.model.eval()
    prompt = make_prompt("single", length, random.Random(f"{seed}/distance"))
    tokens = torch.tensor([[token_ids()[word] for word in prompt.words]], device=device)
    own, other = network(tokens).logits, network.model(input_ids=tokens, use_cache=False).logits
    network.model.train()
    return float((own - other).abs().amax(-1).median())


@torch.no_grad()
def ablate(
    network: LeanNetwork, length: int, *, prompts: int, seed: int, device: torch.device, autocast: bool
) -> dict[str, float]:
    """Exact match of changed networks: which layers read, and whether the Indexer has to choose well.

    Keys: `none`, the whole network; a layer, its compressed entries set to zero; `CSA` and `HCA`, those of all layers
    of that kind; `top-k N`, the Indexers choose N entries. Prompts are those of `score`.
    """

    def overall() -> float:
        scores = score(network, [length], prompts=prompts, seed=seed, device=device, autocast=autocast)
        return scores[str(length)]["all"]

    reading = {layer: kind for layer, kind in enumerate(network.kinds) if kind.ratio and not kind.silent}
    groups = {"none": [], **{str(layer): [layer] for layer in reading}}
    groups["CSA"] = [layer for layer, kind in reading.items() if kind.indexer]
    groups["HCA"] = [layer for layer, kind in reading.items() if not kind.indexer]
    result = {}
    for name, layers in groups.items():
        weights = [network.model.model.layers[layer].self_attn.compressor.kv_norm.weight for layer in layers]
        kept = [weight.clone() for weight in weights]
        for weight in weights:
            weight.zero_()
        result[name] = overall()
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    whole = network.sizes
    for divisor in _FEWER:
        network.sizes = replace(whole, index_topk=max(1, whole.index_topk // divisor))
        result[f"top-k {network.sizes.index_topk}"] = overall()
    network.sizes = whole
    return result


def _exact(
    network: LeanNetwork, kind: str, length: int, count: int, rng: random.Random, device: torch.device, autocast: bool
) -> list[bool]:
    ids = token_ids()
    made = [make_prompt(kind, length, rng) for _ in range(count)]
    rows = [[ids[word] for word in [*prompt.words, *prompt.answer]] for prompt in made]
    longest = -(-max(len(row) for row in rows) // _ROUND) * _ROUND
    tokens = torch.full((count, longest), ids[PAD])
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        best = network(tokens.to(device)).logits.argmax(-1).cpu()
    right = []
    for index, (prompt, row) in enumerate(zip(made, rows, strict=True)):
        start = len(prompt.words)
        right.append(best[index, start - 1 : len(row) - 1].tolist() == row[start:])
    return right
