"""One rank is made to differ, in every way there is a reason for: all ranks recompute together, and nobody hangs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tests.engine.ranks.damage import CASES
from tests.engine.ranks.job import start
from tests.support.networks import NetworkOptions, network, write_network
from trt_redknot.admission import FallbackReason

TOLERANCE = 1e-8
JOB_TIMEOUT_S = 240.0
VOCAB = 97
# What a request finds where the first one has moved a corrupt artifact into quarantine.
QUARANTINED = FallbackReason.MISSING_ARTIFACT


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two networks of one geometry with different weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = []
    for name in ("one", "two"):
        options = NetworkOptions(
            kinds="chs", hash_layers=1, groups=8, heads_per_group=2, hca=8, seed=random.randrange(2**31)
        )
        paths.append(str(write_network(network(options), folder / name)))
    return paths[0], paths[1]


def test_every_reason_has_a_case() -> None:
    assert {case.reason for case in CASES.values()} == set(FallbackReason)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_ranks_fall_back_alike(tmp_path: Path, checkpoints: tuple[str, str], size: int) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    task = {
        "seed": seed,
        "checkpoint": checkpoints[0],
        "other": checkpoints[1],
        "documents": [[draw.randrange(VOCAB) for _ in range(count)] for count in (12, 26)],
        "question": [draw.randrange(VOCAB) for _ in range(3)],
    }
    finished = start(size, "fallback", tmp_path, task, timeout_s=JOB_TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
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
