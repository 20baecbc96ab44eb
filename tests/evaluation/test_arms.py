"""Pairs on a real engine: exact where they must be, rejected where reuse did not happen."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.conftest import RECORDS, Nano
from trt_redknot import ArtifactStore
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.evaluation.arms import ArmRunner, EvaluationError, PairResult
from trt_redknot.evaluation.frozen import Question, open_frozen
from trt_redknot.evaluation.prompts import Cutting, make_prompt


@pytest.fixture
def runner(nano: Nano) -> ArmRunner:
    return ArmRunner(
        engine=nano.engine, tokenizer=nano.tokenizer, store=nano.store, short_tokens=3, longer_tokens=6
    )  # fmt: skip


@pytest.fixture(scope="module")
def question() -> Question:
    return open_frozen(RECORDS, ["nano-256.jsonl"])[1][0]


def run(runner: ArmRunner, question: Question, policy: ReusePolicy, cutting: Cutting) -> PairResult:
    prompt = make_prompt(question.record, runner.tokenizer.encode, cutting)
    return runner.compare(
        "policy", question, prompt, runner.reuse(prompt, question, policy), runner.recompute(prompt, question)
    )


def test_all_rows_protected_and_whole_windows_are_recomputation(runner: ArmRunner, question: Question) -> None:
    cutting = Cutting(multiple=runner.engine.geometry.coarsest_ratio)
    found = run(runner, question, ReusePolicy(protect="all"), cutting)
    assert found.kl < 1e-8
    assert found.top1
    assert found.same == found.compared == len(found.reuse.tokens)
    assert found.reuse.text == found.recompute.text
    assert found.reuse.rows["protected"] == found.prompt_tokens
    assert found.reuse.saved["token_rows"] == 0.0


def test_a_pair_says_what_ran(runner: ArmRunner, question: Question) -> None:
    policy = ReusePolicy(budget=0.25, boundary=4, tail=0, top_entries=2, tau=0.9)
    found = run(runner, question, policy, Cutting())
    rows = found.reuse.rows
    assert rows["protected"] + rows["active"] + rows["omitted"] == rows["total"] == found.prompt_tokens
    assert rows["active"] > 0
    assert rows["omitted"] > 0
    assert found.recompute.rows["protected"] == found.prompt_tokens
    assert found.documents == len(question.record.documents)
    assert found.references == question.record.answers
    assert found.kl >= 0.0
    assert 1 <= found.compared <= 3
    assert found.reuse.saved["token_rows"] > 0.0
    assert sum(found.reuse.fanout) > 0
    assert PairResult.model_validate_json(found.model_dump_json()) == found


def test_a_reuse_arm_that_recomputed_is_rejected(
    runner: ArmRunner, question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path / "store")
    prompt = make_prompt(question.record, runner.tokenizer.encode, Cutting())
    build = type(runner.engine).build_artifact

    def build_and_lose(engine: object, into: ArtifactStore, tokens: object, **how: object) -> str:
        found = build(runner.engine, into, tokens, **how)  # type: ignore[arg-type]
        for folder in (tmp_path / "store").rglob(f"*{found}*"):
            shutil.rmtree(folder, ignore_errors=True)
        return found

    monkeypatch.setattr(type(runner.engine), "build_artifact", build_and_lose)
    with pytest.raises(EvaluationError, match=rf"{question.record.id} recomputed.*missing_artifact"):
        replace(runner, store=store).reuse(prompt, question, ReusePolicy())


def test_arms_of_different_prompts_are_no_pair(runner: ArmRunner, question: Question) -> None:
    prompt = make_prompt(question.record, runner.tokenizer.encode, Cutting())
    shorter = replace(prompt, after=prompt.after[1:])
    answer = runner.recompute(shorter, question)
    with pytest.raises(EvaluationError, match="no pair"):
        runner.compare("policy", question, prompt, answer, runner.recompute(prompt, question))
