"""Engines answer by plans as by ops: the recorded networks of the plans against the torch backend, in both arms."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.job import make_engine, start
from tests.engine.ranks.scenario import Scenario, answer_all, make_scenario
from tests.support.plan_engine import OPTIONS, load_for_plans, write_plan_network
from trt_redknot import ArtifactStore
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase

# In fp64 padding changes nothing but the order in which a matrix product is cut.
TOLERANCE = 1e-8
JOB_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A network on disk, questions, and what the torch backend answers."""

    checkpoint: Path
    seed: int
    scenario: Scenario
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder, seed = tmp_path_factory.mktemp("reference"), random.randrange(2**31)
    checkpoint = write_plan_network(folder / "checkpoint", seed)
    scenario = make_scenario(seed, OPTIONS.vocab)
    # A single row; a request that omits rows to the end; a batch of both arms that is decoded together.
    scenario["batches"] = [scenario["batches"][index] for index in (0, 3, 5)]
    engine = make_engine(checkpoint, folder / "engine", None, chunk_rows=1000)
    answers = answer_all(engine, ArtifactStore(folder / "store"), scenario)
    return Reference(checkpoint=checkpoint, seed=seed, scenario=scenario, answers=answers)


def assert_same(reference: Reference, found: list[dict[str, Any]], where: str) -> None:
    for number, (wanted, answer) in enumerate(zip(reference.answers, found, strict=True)):
        place = f"answer {number}, seed {reference.seed}, {where}"
        error = (torch.tensor(wanted["logits"]) - torch.tensor(answer["logits"])).abs().max()
        assert float(error) <= TOLERANCE, place
        for key in ("tokens", "arm", "classes", "histogram"):
            assert wanted[key] == answer[key], f"{key} of {place}"


def test_plans_answer_like_ops(reference: Reference, platform: Platform, tmp_path: Path) -> None:
    """Both arms, documents made by plans, chunks with rows of one class or of both, decoding of several sequences."""
    chunk_rows = random.randrange(6, 30)
    make_engine(reference.checkpoint, tmp_path / "engine", None, chunk_rows=chunk_rows)
    files = load_for_plans(tmp_path / "engine", None)
    interpreter = files.interpreter(platform)
    found = answer_all(files.engine(interpreter), ArtifactStore(tmp_path / "store"), reference.scenario)
    assert {answer["arm"] for answer in found} == {"reuse", "recompute"}
    assert {row for answer in found for row in answer["classes"]} == {0, 1, 2}
    assert_same(reference, found, f"{chunk_rows} rows a chunk")
    plans = {spec.kind.name for spec in interpreter.specs}
    assert {name for name, _ in interpreter.runs} == plans
    assert {name for name, phase in interpreter.runs if phase is Phase.DECODE} == plans


def test_plans_of_two_ranks_answer_like_ops_of_one(reference: Reference, tmp_path: Path) -> None:
    """Few rows a chunk, so that ranks own unequally many, and some own none."""
    task = {
        "checkpoint": str(reference.checkpoint), "chunk_rows": random.randrange(7, 12), "scenario": reference.scenario,
    }  # fmt: skip
    finished = start(2, "plan_answers", tmp_path, task, timeout_s=JOB_TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    assert len({own["digest"] for own in found["ranks"]}) == 1, "the ranks answer differently"
    assert found["ranks"][0]["runs"] == found["ranks"][1]["runs"], "the ranks met in other plans"
    assert_same(reference, found["answers"], f"{task['chunk_rows']} rows a chunk")
