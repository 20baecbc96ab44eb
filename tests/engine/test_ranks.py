"""2, 4 and 8 ranks under mpirun: they answer like one rank, and where one is made to differ all recompute together.

One job runs all of it; jobs in which a rank is killed are their own.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.damage import CASES
from tests.engine.ranks.job import TASK, make_engine, start
from tests.engine.ranks.scenario import Scenario, answer_all, as_json, make_request, make_scenario
from tests.support.networks import NetworkOptions, network, write_network
from tests.support.ties import NEAR, smallest_gap
from trt_redknot import ArtifactStore
from trt_redknot.admission import FallbackReason

# What is equal by construction, in fp64; and what the engines' usual fp32 must keep.
TOLERANCE = 1e-8
TOLERANCE_FP32 = 1e-4
SIZES = (8, 4, 2)
# Loaded machines are slow machines; a run of the job, or a job, that hangs is found all the same.
RUN_TIMEOUT_S = 400.0
JOB_TIMEOUT_S = 240.0
KILLED_WITHIN_S = 30.0
# What a request finds where the first one has moved a corrupt artifact into quarantine.
QUARANTINED = FallbackReason.MISSING_ARTIFACT
OPTIONS = NetworkOptions(kinds="chcs", hash_layers=1, groups=8, heads_per_group=2, experts=11, hca=8, window=12, topk=4)


# The first test of the job waits for all of it.
pytestmark = pytest.mark.timeout(2 * len(SIZES) * RUN_TIMEOUT_S)


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


@pytest.fixture(scope="module")
def runs(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one folder for each script and number of ranks, where the ranks left what they saw."""
    folder = tmp_path_factory.mktemp("runs")
    places = []
    for size in SIZES:
        for script, task in (("answers", answers_task(reference, size)), ("fallback", fallback_task(folder))):
            place = folder / f"{script}-{size}"
            place.mkdir()
            (place / TASK).write_text(json.dumps(task), encoding="utf-8")
            places.append([script, size, str(place)])
    task = {"runs": places, "timeout_s": RUN_TIMEOUT_S}
    finished = start(max(SIZES), "sizes", folder, task, timeout_s=len(places) * RUN_TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    return folder


def answers_task(reference: Reference, size: int) -> dict[str, Any]:
    return {
        "checkpoint": str(reference.checkpoint), "seed": reference.seed, "scenario": reference.scenario,
        "fp32": reference.fp32, "chunk_rows": random.randrange(2 * size, 6 * size),
    }  # fmt: skip


def fallback_task(folder: Path) -> dict[str, Any]:
    """Documents, and two networks of one geometry with different weights."""
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    for name in ("one", "two"):
        if not (folder / name).exists():
            options = NetworkOptions(
                kinds="chs", hash_layers=1, groups=8, heads_per_group=2, hca=8, seed=draw.randrange(2**31)
            )
            write_network(network(options), folder / name)
    return {
        "seed": seed, "checkpoint": str(folder / "one"), "other": str(folder / "two"),
        "documents": [[draw.randrange(OPTIONS.vocab) for _ in range(count)] for count in (12, 26)],
        "question": [draw.randrange(OPTIONS.vocab) for _ in range(3)],
    }  # fmt: skip


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


@pytest.mark.parametrize("size", SIZES)
def test_ranks_answer_like_one_rank(reference: Reference, runs: Path, size: int) -> None:
    folder = runs / f"answers-{size}"
    chunk_rows = json.loads((folder / TASK).read_text(encoding="utf-8"))["chunk_rows"]
    found = json.loads((folder / "answers.json").read_text(encoding="utf-8"))

    for rank, own in enumerate(found["ranks"]):
        for transport, (checked, failed) in zip(("MPI", "Gloo"), own["collectives"], strict=True):
            assert failed == [], f"rank {rank} over {transport}"
            assert checked > 50
    assert len({own["digest"] for own in found["ranks"]}) == 1, "the ranks answer differently"

    where = f"seed {reference.seed}, {chunk_rows} rows a chunk"
    asked = [*reference.answers, *reference.answers[-len(found["spread"]) :]]
    for number, (one, many) in enumerate(zip(asked, [*found["answers"], *found["spread"]], strict=True)):
        assert off_by(one["logits"], many["logits"]) <= TOLERANCE, f"answer {number}, {where}"
        for key in ("tokens", "arm", "classes", "histogram"):
            assert one[key] == many[key], f"{key} of answer {number}, {where}"
    error = off_by(reference.fp32_answer["logits"], found["fp32"]["logits"])
    assert error <= TOLERANCE_FP32 or reference.fp32_gap < NEAR, f"{error}, {where}"


def test_every_reason_has_a_case() -> None:
    assert {case.reason for case in CASES.values()} == set(FallbackReason)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_fall_back_alike(runs: Path, size: int) -> None:
    """One rank is made to differ, in every way there is a reason for: nobody hangs, and the answer is recomputed."""
    folder = runs / f"fallback-{size}"
    seed = json.loads((folder / TASK).read_text(encoding="utf-8"))["seed"]
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    for content in ranks:
        assert content["clean"] == ["reuse", None]
        assert content["omitted"] > 0
        assert content["opened"] == ranks[0]["opened"]
        assert "the ranks opened different engines" in content["opened"]["another engine"]
        assert re.search(r"rank \d: a file of the engine has another size", content["opened"]["damaged engine"])
    for name, case in CASES.items():
        seen = [content["cases"][name] for content in ranks]
        where = f"{name}, seed {seed}: {seen}"
        assert {(each["reason"], each["detail"]) for each in seen} == {(case.reason.value, seen[0]["detail"])}, where
        assert all(each["arm"] == "recompute" and not each["admitted"] for each in seen), where
        assert all(each["error"] <= TOLERANCE and each["same_tokens"] for each in seen), where
        assert all(each["after"] == ["reuse", None] for each in seen), where
        again = {each["again"] for each in seen}
        assert len(again) == 1, where
        assert again <= ({case.reason.value, QUARANTINED.value} if case.lasting else {None}), where
        if case.reason not in (FallbackReason.STALE_GENERATION, FallbackReason.RANK_DISAGREEMENT):
            assert f"rank {seen[0]['odd']}" in seen[0]["detail"], where


@pytest.mark.parametrize("size", [4])
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
