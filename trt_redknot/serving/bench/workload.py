"""The prompts of a bench: some documents in some order, then a question. The same for both arms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import RequestError
from trt_redknot.serving.bench.records import Arm


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked.

    Attributes:
        documents: token ids of each.
        documents_a_prompt: how many a prompt has, drawn without repetition, in random order.
        question_tokens: length of the question, whose ids are random.
        vocab: ids are below this.
        output_tokens: every answer has so many tokens; no stop token ends it sooner.
        policy: of the reuse arm.
        seed: draws everything.
    """

    documents: tuple[tuple[int, ...], ...]
    documents_a_prompt: int
    question_tokens: int
    vocab: int
    output_tokens: int
    policy: ReusePolicy
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.documents_a_prompt <= len(self.documents):
            raise RequestError(
                "a prompt cannot have so many documents", expected=f"1 to {len(self.documents)}",
                found=self.documents_a_prompt,
            )  # fmt: skip
        if min(self.question_tokens, self.output_tokens, self.vocab) < 1:
            raise RequestError("questions, answers and the vocabulary have one token at least")

    def request(self, prompt: int, arm: Arm, artifact_ids: Sequence[str]) -> dict[str, object]:
        """Prompt number `prompt` as an arm asks it, in the form of docs/requests.md.

        Args:
            artifact_ids: of the documents, in their order.
        """
        draw = np.random.default_rng([self.seed, prompt])
        chosen = draw.permutation(len(self.documents))[: self.documents_a_prompt]
        question = draw.integers(0, self.vocab, self.question_tokens).tolist()
        segments: list[dict[str, object]] = [
            {"artifact": artifact_ids[index], "tokens": list(self.documents[index])} for index in chosen
        ]
        return {
            "segments": [*segments, {"tokens": question}],
            "max_new_tokens": self.output_tokens,
            "stop_tokens": [],
            "reuse": self.policy.model_dump(mode="json") if arm is Arm.REUSE else None,
        }

    def builds(self) -> dict[str, object]:
        """The request that builds all documents."""
        return {"documents": [{"tokens": list(document)} for document in self.documents]}


def random_documents(count: int, length: int, vocab: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """`count` documents of `length` random ids."""
    draw = np.random.default_rng(seed)
    return tuple(tuple(draw.integers(0, vocab, length).tolist()) for _ in range(count))
