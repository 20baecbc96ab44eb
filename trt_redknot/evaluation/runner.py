"""Runs variants over questions: resumable, in lockstep on all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.digests import digest_json
from trt_redknot.engine.manifest import EngineManifest
from trt_redknot.engine.response import Response
from trt_redknot.evaluation.arms import ArmRunner
from trt_redknot.evaluation.frozen import FrozenSet, Question
from trt_redknot.evaluation.journal import RESULTS, Journal
from trt_redknot.evaluation.prompts import Cutting, CuttingError, Prompt, make_prompt
from trt_redknot.evaluation.variants import BASE_ENGINE, Variant

_PROBE_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run would do.

    Attributes:
        seconds: a short pair's prefill and decoding in proportion to prompt tokens and to the most tokens of answers.
            An estimate from above: answers may stop earlier, variants share their recompute arm.
    """

    records: int
    pairs: int
    done: int
    prompt_tokens: int
    seconds: float
    probe_tokens: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Variants over questions on one or several engines.

    Attributes:
        runners: by engine name; all engines have the same tokenizer.
    """

    frozen: FrozenSet
    questions: Sequence[Question]
    variants: Sequence[Variant]
    runners: Mapping[str, ArmRunner]

    def describe(self) -> dict[str, Any]:
        """What the results depend on."""
        return {
            "records": self.frozen.name,
            "digest": self.frozen.digest,
            "questions": len(self.questions),
            "asked": digest_json([[question.file, question.record.id] for question in self.questions]),
            "variants": [variant.to_json() for variant in self.variants],
            "engines": {
                name: _engine_json(runner.engine.manifest, runner.engine.geometry, runner.engine.device.type)
                for name, runner in self.runners.items()
            },
            "answer_tokens": [self._base.short_tokens, self._base.longer_tokens],
            "left_out": [
                {"variant": variant, "id": record, "reason": reason}
                for (variant, record), reason in self.left_out.items()
            ],
        }

    @cached_property
    def left_out(self) -> Mapping[tuple[str, str], str]:
        """Why a variant leaves a record out, by variant and record: its context is too short for the cutting."""
        reasons = {}
        for variant in self.variants:
            if variant.cutting.multiple is None:
                continue
            for question in self.questions:
                try:
                    self._prompt(question, variant.cutting)
                except CuttingError as error:
                    reasons[variant.name, question.record.id] = str(error)
        return reasons

    def run(self, output: Path, progress: Callable[[int], None] = lambda _: None) -> None:
        """Fill the journal in `output`; pairs that are in it already are left out. Collective.

        Raises:
            JournalError: the output is of another run.
            EvaluationError: a reuse arm recomputed.
        """
        collectives = self._base.engine.collectives
        first = collectives.rank == 0
        journal = Journal(output / RESULTS, self.describe()) if first else None
        try:
            known = json.dumps([list(key) for key in journal.results] if journal else []).encode()
            done = {tuple(key) for key in json.loads(collectives.exchange(known)[0])} | self.left_out.keys()
            progress(sum((variant.name, q.record.id) in done for variant in self.variants for q in self.questions))
            for question in self.questions:
                self._question(question, done, journal, progress)
        finally:
            if journal is not None:
                journal.close()

    def _question(
        self, question: Question, done: set[tuple[str, ...]], journal: Journal | None, progress: Callable[[int], None]
    ) -> None:
        """All variants of one record. The recompute arm runs once for each engine and order of documents."""
        recomputed: dict[tuple[str, str], Response] = {}
        for variant in self.variants:
            if (variant.name, question.record.id) in done:
                continue
            runner = self.runners[variant.engine]
            prompt = self._prompt(question, variant.cutting)
            key = (variant.engine, variant.cutting.order)
            if key not in recomputed:
                recomputed[key] = runner.recompute(prompt, question)
            reuse = runner.reuse(prompt, question, variant.policy)
            result = runner.compare(variant.name, question, prompt, reuse, recomputed[key])
            if journal is not None:
                journal.append(result)
            progress(1)

    def workload(self, finished: int) -> Workload:
        """Records, tokens and an estimate of seconds; runs one short probe of both arms. Collective."""
        lengths = {
            (variant.name, question.record.id): len(self._prompt(question, variant.cutting).tokens)
            for variant in self.variants
            for question in self.questions
            if (variant.name, question.record.id) not in self.left_out
        }
        probe, prefill_s, token_s = self._probe()
        tokens, pairs = sum(lengths.values()), len(lengths)
        most = {question.record.id: self._base.most_tokens(question) for question in self.questions}
        answers = sum(most[record] - 1 for _, record in lengths)
        seconds = prefill_s / probe * tokens + token_s * 2 * answers
        return Workload(
            records=len(self.questions), pairs=pairs, done=finished, prompt_tokens=tokens,
            seconds=seconds * (pairs - finished) / max(1, pairs), probe_tokens=probe,
        )  # fmt: skip

    def _probe(self) -> tuple[int, float, float]:
        """Prompt tokens of one short pair, seconds of both prefills with their artifacts, seconds a decoded token."""
        question = min(self.questions, key=lambda question: len(question.record.context))
        tokens = self._prompt(question, Cutting()).tokens[:_PROBE_TOKENS]
        cut = max(1, len(tokens) - 16)
        short = Prompt(
            before=(), documents=(tuple(tokens[: cut // 2]), tuple(tokens[cut // 2 : cut])), after=tuple(tokens[cut:])
        )
        started = time.perf_counter()
        answers = [self._base.recompute(short, question), self._base.reuse(short, question, self.variants[0].policy)]
        total_s = time.perf_counter() - started
        decode_s = sum(answer.report.timings.decode_s for answer in answers)
        decoded = sum(len(answer.tokens) - 1 for answer in answers)
        return len(tokens), total_s - decode_s, decode_s / decoded if decoded else 0.0

    @property
    def _base(self) -> ArmRunner:
        return self.runners[BASE_ENGINE]

    def _prompt(self, question: Question, cutting: Cutting) -> Prompt:
        return make_prompt(question.record, self._base.tokenizer.encode, cutting)


def _engine_json(manifest: EngineManifest, geometry: ModelGeometry, device: str) -> dict[str, Any]:
    """What an engine's answers depend on."""
    return {
        "checkpoint": manifest.checkpoint_fingerprint,
        "profile": manifest.profile.digest,
        "artifacts": manifest.artifact_format.value,
        "dtype": manifest.dtype,
        "experts": manifest.experts,
        "identity": digest_json(asdict(manifest.artifact_identity(geometry))),
        "ranks": manifest.tp_size,
        "backend": manifest.backend,
        "device": device,
    }
