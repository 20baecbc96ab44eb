"""Both arms of one record on the same engine and the same tokens, and what can be said of the pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.response import Response
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.errors import RedKnotError
from trt_redknot.evaluation.agreement import repetition, token_agreement
from trt_redknot.evaluation.frozen import Question
from trt_redknot.evaluation.prompts import Prompt
from trt_redknot.evaluation.scoring import best_exact_match, best_f1
from trt_redknot.reports.compare import kl_divergence
from trt_redknot.request.request import Artifact, Request, Tokens


class EvaluationError(RedKnotError):
    """A result cannot count: the reuse arm recomputed, or the arms did not answer the same request."""


class ArmResult(BaseModel):
    """One arm's answer.

    Attributes:
        loop: period of the repetition the answer ends in.
        rows: rows of the prompt by class.
        saved: share saved in each counted ledger.
        fanout: index k: (row, layer) pairs of reusable layers that ran k experts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: tuple[int, ...]
    text: str
    f1: float
    exact: float
    finish: Literal["stop", "length"]
    loop: int | None
    ttft_s: float
    decode_s: float
    rows: dict[str, int]
    saved: dict[str, float]
    fanout: tuple[int, ...]


class PairResult(BaseModel):
    """Both arms of one record.

    Attributes:
        kl: KL(recompute || reuse) of the first token's distributions, nats.
        top1: both arms' most likely first token is the same.
        same, compared, prefix: agreement of the answers' tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: str
    id: str
    file: str
    kind: str
    longer: bool
    question: str
    references: tuple[str, ...]
    prompt_tokens: int
    documents: int
    kl: float
    top1: bool
    same: int
    compared: int
    prefix: int
    reuse: ArmResult
    recompute: ArmResult


@dataclass(frozen=True, kw_only=True)
class ArmRunner:
    """Runs prompts on one engine.

    Attributes:
        short_tokens, longer_tokens: most tokens of an answer, by the kind of record.
    """

    engine: Engine
    tokenizer: EngineTokenizer
    store: ArtifactStore
    short_tokens: int
    longer_tokens: int

    def recompute(self, prompt: Prompt, question: Question) -> Response:
        """The recompute arm: the same tokens as one fresh segment."""
        request = Request(segments=[Tokens(prompt.tokens)], max_new_tokens=self.most_tokens(question), reuse=None)
        return self.engine.generate(request, store=self.store)

    def reuse(self, prompt: Prompt, question: Question, policy: ReusePolicy) -> Response:
        """The reuse arm; artifacts that are missing are built.

        Raises:
            EvaluationError: the ranks recomputed: the result must not count as reuse.
        """
        parts: list[Artifact | Tokens] = [
            Artifact(self.engine.build_artifact(self.store, document), tokens=document) for document in prompt.documents
        ]
        if prompt.before:
            parts.insert(0, Tokens(prompt.before))
        parts.append(Tokens(prompt.after))
        request = Request(segments=parts, max_new_tokens=self.most_tokens(question), reuse=policy)
        response = self.engine.generate(request, store=self.store)
        report = response.report
        if not report.admitted:
            raise EvaluationError(
                f"the reuse arm of {question.record.id} recomputed, so its result is rejected", expected="reuse",
                found=f"{report.fallback_reason}: {report.fallback_detail}",
                remedy="Repair the store or the policy, then run the command again: finished records are kept.",
            )  # fmt: skip
        return response

    def compare(
        self, variant: str, question: Question, prompt: Prompt, reuse: Response, recompute: Response
    ) -> PairResult:
        """Scores of the pair.

        Raises:
            EvaluationError: the arms answered different prompts.
        """
        if recompute.report.arm != "recompute" or reuse.plan.rows != recompute.plan.rows:
            raise EvaluationError(
                f"the arms of {question.record.id} are no pair", expected=f"{recompute.plan.rows} rows",
                found=f"{reuse.plan.rows} rows",
            )  # fmt: skip
        record = question.record
        agreement = token_agreement(reuse.tokens, recompute.tokens)
        return PairResult(
            variant=variant, id=record.id, file=question.file, kind=record.kind, longer=question.longer,
            question=record.input, references=record.answers, prompt_tokens=reuse.plan.rows,
            documents=len(prompt.documents), kl=kl_divergence(recompute.first_logits, reuse.first_logits),
            top1=int(reuse.first_logits.argmax()) == int(recompute.first_logits.argmax()), same=agreement.same,
            compared=agreement.compared, prefix=agreement.prefix, reuse=self._arm(reuse, question),
            recompute=self._arm(recompute, question),
        )  # fmt: skip

    def most_tokens(self, question: Question) -> int:
        """Most tokens of the answer to a question."""
        return self.longer_tokens if question.longer else self.short_tokens

    def _arm(self, response: Response, question: Question) -> ArmResult:
        report, text = response.report, self.tokenizer.decode(response.tokens).strip()
        references = question.record.answers
        return ArmResult(
            tokens=tuple(response.tokens), text=text, f1=best_f1(text, references),
            exact=best_exact_match(text, references), finish=response.finish_reason, loop=repetition(response.tokens),
            ttft_s=report.timings.ttft_s, decode_s=report.timings.decode_s,
            rows={"total": report.rows.total, "protected": report.rows.protected, "active": report.rows.active,
                  "omitted": report.rows.omitted},
            saved={"logical_head_rows": report.ledgers.logical_head_rows.share,
                   "token_rows": report.ledgers.token_rows.share, "arithmetic": report.ledgers.arithmetic.share},
            fanout=tuple(report.k_histogram),
        )  # fmt: skip
