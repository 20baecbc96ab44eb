"""Tensor parallelism changes nothing: 2, 4 and 8 ranks under mpirun against one rank, in one job a size."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.job import make_engine, start
from tests.engine.ranks.scenario import Scenario, answer_all, as_json, make_request, make_scenario
from tests.support.networks import NetworkOptions, network, write_network
from tests.support.ties import NEAR, smallest_gap
from trt_redknot import ArtifactStore

# What is equal by construction, in fp64; and what the engines' usual fp32 must keep.
TOLERANCE = 1e-8
TOLERANCE_FP32 = 1e-4
# Loaded machines are slow machines; a job that hangs is found all the same.
JOB_TIMEOUT_S = 240.0
KILLED_WITHIN_S = 30.0
OPTIONS = NetworkOptions(kinds="chcs", hash_layers=1, groups=8, heads_per_group=2, experts=11, hca=8, window=12, topk=4)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A network on disk, questions, and the answers of one rank."""

    checkpoint: Path
    seed: int
    scenario: Scenario
    answers: list[dict[str, Any]]
    fp32: dict[str, Any]
    fp32_answer: dict[str, Any]
    fp32_gap: float


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    seed = random.randrange(2**31)
    options = NetworkOptions(**{**OPTIONS.__dict__, "seed": seed})
    checkpoint = write_network(network(options), folder / "checkpoint")
    scenario = make_scenario(seed, options.vocab)
    engine = make_engine(checkpoint, folder / "engine", None, chunk_rows=1000)
    answers = answer_all(engine, ArtifactStore(folder / "store"), scenario)
    tokens = [random.randrange(options.vocab) for _ in range(70)]
    fp32 = {"segments": [{"tokens": tokens}], "steps": 1, "reuse": None}
    single = make_engine(checkpoint, folder / "single", None, chunk_rows=1000, dtype="float32")
    return Reference(
        checkpoint=checkpoint,
        seed=seed,
        scenario=scenario,
        answers=answers,
        fp32=fp32,
        fp32_answer=as_json(single.generate(make_request(fp32, []))),
        fp32_gap=smallest_gap(single, tokens),
    )


def alive(pid: int) -> bool:
    """Whether a process still runs; one that ended may wait in the table for a parent that takes its status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def off_by(left: list[float], right: list[float]) -> float:
    return float((torch.tensor(left) - torch.tensor(right)).abs().max())


def test_the_scenario_reuses_omits_and_activates(reference: Reference) -> None:
    """The questions are worth asking: both arms, every row class, several tokens."""
    arms = [answer["arm"] for answer in reference.answers]
    assert arms.count("reuse") == 4
    assert arms.count("recompute") == 4
    assert {row for answer in reference.answers for row in answer["classes"]} == {0, 1, 2}
    assert all(torch.tensor(answer["logits"]).isfinite().all() for answer in reference.answers)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_answer_like_one_rank(reference: Reference, tmp_path: Path, size: int) -> None:
    chunk_rows = random.randrange(2 * size, 6 * size)
    task = {
        "checkpoint": str(reference.checkpoint), "seed": reference.seed, "chunk_rows": chunk_rows,
        "scenario": reference.scenario, "fp32": reference.fp32,
    }  # fmt: skip
    finished = start(size, "answers", tmp_path, task, timeout_s=JOB_TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))

    for rank, own in enumerate(found["ranks"]):
        for transport, (checked, failed) in zip(("MPI", "Gloo"), own["collectives"], strict=True):
            assert failed == [], f"rank {rank} over {transport}"
            assert checked > 50
    assert len({own["digest"] for own in found["ranks"]}) == 1, "the ranks answer differently"

    where = f"seed {reference.seed}, {chunk_rows} rows a chunk"
    for number, (one, many) in enumerate(zip(reference.answers, found["answers"], strict=True)):
        assert off_by(one["logits"], many["logits"]) <= TOLERANCE, f"answer {number}, {where}"
        for key in ("tokens", "arm", "classes", "histogram"):
            assert one[key] == many[key], f"{key} of answer {number}, {where}"
    error = off_by(reference.fp32_answer["logits"], found["fp32"]["logits"])
    assert error <= TOLERANCE_FP32 or reference.fp32_gap < NEAR, f"{error}, {where}"


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_job(reference: Reference, tmp_path: Path, size: int) -> None:
    victim, layer = random.randrange(size), random.randrange(len(OPTIONS.kinds))
    task = {
        "checkpoint": str(reference.checkpoint), "victim": victim, "layer": layer,
        "question": reference.scenario["batches"][1][0],
    }  # fmt: skip
    finished = start(size, "killed", tmp_path, task, timeout_s=JOB_TIMEOUT_S)
    ended = time.time()
    assert finished.returncode != 0
    assert not list(tmp_path.glob("finished-*")), "a rank went on without the victim"
    killed = tmp_path / "killed"
    assert killed.read_text(encoding="utf-8") == f"rank {victim} in layer {layer}"
    assert ended - killed.stat().st_mtime < KILLED_WITHIN_S
    pids = [int(path.read_text(encoding="utf-8")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == size
    assert os.getpid() not in pids
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
