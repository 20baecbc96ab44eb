"""Scores of a network: what is right is counted as greedy decoding would give it, and ablation leaves no trace."""

from __future__ import annotations

import dataclasses
import random

import torch

from trt_redknot.evaluation.nano.lean import Forward, LeanNetwork
from trt_redknot.evaluation.nano.network import SMALL, make_model
from trt_redknot.evaluation.nano.scores import ablate, score
from trt_redknot.evaluation.nano.words import END, token_ids
from trt_redknot.evaluation.nano.world import KINDS

CPU = torch.device("cpu")
TOY = dataclasses.replace(SMALL, layers=4, sinkhorn=2)


class Oracle:
    """A network that has read the rest: its most likely token is the next one, but for some places."""

    def __init__(self, network: LeanNetwork, wrong_last: bool) -> None:
        self.model = network.model
        self.kinds = network.kinds
        self.sizes = network.sizes
        self._wrong_last = wrong_last

    def __call__(self, tokens: torch.Tensor) -> Forward:
        following = tokens.roll(-1, dims=1)
        if self._wrong_last:
            following = torch.where(following == token_ids()[END], 2, following)
        logits = torch.nn.functional.one_hot(following, self.model.config.vocab_size).float()
        return Forward(logits=logits, streams={}, selections={})


def test_every_token_of_an_answer_must_be_right() -> None:
    network = LeanNetwork(make_model(TOY, 1))
    for wrong, expected in ((False, 1.0), (True, 0.0)):
        oracle = Oracle(network, wrong)
        found = score(oracle, [256], prompts=2, seed=random.randrange(2**31), device=CPU, autocast=False)  # type: ignore[arg-type]
        assert found == {"256": {**dict.fromkeys(KINDS, expected), "all": expected}}


def test_ablation_names_what_it_changes_and_leaves_no_trace() -> None:
    network = LeanNetwork(make_model(TOY, 2), silent=TOY.silent)
    before = {name: value.clone() for name, value in network.model.state_dict().items()}
    found = ablate(network, 256, prompts=1, seed=3, device=CPU, autocast=False)
    assert list(found) == ["none", "3", "CSA", "HCA", "top-k 4", "top-k 2", "top-k 1"]
    assert network.sizes.index_topk == TOY.index_topk
    assert all(0.0 <= value <= 1.0 for value in found.values())
    for name, value in network.model.state_dict().items():
        assert torch.equal(value, before[name]), name
