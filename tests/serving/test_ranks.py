"""Two ranks under mpirun: they answer like one, whatever is cancelled in between, and go together when one is lost."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks.job import TASK, make_engine, rank_environment
from tests.engine.test_ranks import alive
from tests.serving.support import POLICY, ids, make_checkpoint
from trt_redknot import Artifact, ArtifactStore, Request, Response, ReusePolicy, Tokens
from trt_redknot.launch import run_ranks

# Loaded machines are slow machines; a job that hangs is found all the same.
JOB_TIMEOUT_S = 240.0
ENDS_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A network, documents, and what one rank answers."""

    checkpoint: Path
    documents: list[list[int]]
    requests: list[dict[str, Any]]
    answers: list[Response]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    checkpoint = make_checkpoint(folder, seed=random.randrange(2**31), tokenizer=False)
    engine = make_engine(checkpoint, folder / "engine", None, chunk_rows=50)
    store = ArtifactStore(folder / "store")
    documents = [ids(random.randrange(20, 45)) for _ in range(2)]
    artifact_ids = [engine.build_artifact(store, document) for document in documents]
    requests, answers = [], []
    for number in range(6):
        order = [number % 2, 1 - number % 2]
        question, reuse = ids(3 + 2 * number), POLICY if number % 3 else None
        segments = [*({"artifact": artifact_ids[which]} for which in order), {"tokens": question}]
        requests.append({"segments": segments, "max_new_tokens": 4 + number, "stop_tokens": [], "reuse": reuse})
        answers.append(
            engine.generate(
                Request(
                    segments=[*(Artifact(artifact_ids[which]) for which in order), Tokens(question)],
                    max_new_tokens=4 + number, stop_tokens=[],
                    reuse=None if reuse is None else ReusePolicy(**reuse),  # type: ignore[arg-type]
                ),
                store=store,
            )
        )  # fmt: skip
    return Scene(checkpoint=checkpoint, documents=documents, requests=requests, answers=answers)


def start(folder: Path, scene: Scene, **task: Any) -> Any:
    values = {
        "checkpoint": str(scene.checkpoint), "documents": scene.documents, "requests": scene.requests,
        "cancelled": [], "cancelled_later": [], **task,
    }  # fmt: skip
    (folder / TASK).write_text(json.dumps(values), encoding="utf-8")
    return run_ranks(
        2, ["-m", "tests.serving.ranks_job", str(folder)], timeout_s=JOB_TIMEOUT_S, environment=rank_environment()
    )


def test_two_ranks_serve_like_one_answers(scene: Scene, tmp_path: Path) -> None:
    endless = {**scene.requests[0], "max_new_tokens": 250}
    missing = {**scene.requests[1], "segments": [{"artifact": "0" * 32}]}
    requests = [*scene.requests, endless, endless, missing]
    finished = start(tmp_path, scene, requests=requests, cancelled=[6], cancelled_later=[7])
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    assert [event["type"] for event in found["built"]] == ["built", "built", "done"]
    assert all(event["built"] for event in found["built"][:2])
    *answers, cancelled, later, refused, again = found["answers"]
    for events, wanted in zip(answers, scene.answers, strict=True):
        assert [event["token"] for event in events[:-1]] == events[-1]["tokens"] == wanted.tokens
        report = wanted.report.to_json()
        for key in ("arm", "rows", "ledgers", "k_histogram", "fallback_reason"):
            assert events[-1]["report"][key] == json.loads(json.dumps(report[key]))
    assert {answer.report.arm for answer in scene.answers} == {"reuse", "recompute"}
    assert cancelled[-1]["fault"] == later[-1]["fault"] == "cancelled"
    assert 1 < len(later) < 250
    assert refused[-1]["fault"] == "missing_document"
    assert again[-1]["tokens"] == scene.answers[0].tokens
    assert found["health"] == {
        "state": "ready", "world_size": 2, "waiting": 0, "running": 0, "detail": None, "ready": True,
    }  # fmt: skip
    assert (tmp_path / "finished-0").exists()
    assert (tmp_path / "finished-1").exists()


@pytest.mark.parametrize(
    ("victim", "command", "way"), [(1, "decode", "killed"), (1, "advance", "raised"), (0, "decode", "raised")]
)
def test_a_lost_rank_ends_the_job(scene: Scene, tmp_path: Path, victim: int, command: str, way: str) -> None:
    finished = start(tmp_path, scene, victim=victim, command=command, way=way)
    ended = time.time()
    assert finished.returncode != 0
    assert (tmp_path / "died").read_text(encoding="utf-8") == command
    assert ended - (tmp_path / "died").stat().st_mtime < ENDS_WITHIN_S
    assert not (tmp_path / f"finished-{victim}").exists()
    pids = [int(path.read_text(encoding="utf-8")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
