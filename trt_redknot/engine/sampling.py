"""From logits to the next token. The same logits, parameters and seed give the same token on every rank."""

from __future__ import annotations

import torch

from trt_redknot.request.request import Sampling


class Sampler:
    """Draws the tokens of one request.

    Args:
        sampling: temperature 0 is greedy (ties to the lower id).
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device="cpu").manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the best one, whatever was drawn before."""
        return self._sampling.temperature == 0.0

    def draw(self, logits_V: torch.Tensor) -> int:
        """The next token for fp32 logits [V]."""
        sampling = self._sampling
        if self.greedy:
            return int(logits_V.argmax())
        logits = logits_V.double().cpu()
        # The best is zero before it is divided: the least temperature then leaves it and drops the rest.
        ordered = ((logits - logits.max()) / sampling.temperature).sort(descending=True, stable=True)
        probabilities = ordered.values.softmax(0)
        if sampling.top_k is not None:
            probabilities[sampling.top_k :] = 0
        # The nucleus keeps the token that crosses top_p, so that it is never empty.
        probabilities[(probabilities.cumsum(0) - probabilities) >= sampling.top_p] = 0
        choice = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(ordered.indices[choice])
