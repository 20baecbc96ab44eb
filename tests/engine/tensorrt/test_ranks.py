"""Ranks build one engine of plans under mpirun: all of it by one rename, or nothing and an error on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks.job import rank_environment
from tests.support.plans import specs, write_nano
from trt_redknot.engine.manifest import check_files, read_manifest
from trt_redknot.engine.tensorrt.build import plan_path
from trt_redknot.launch import run_ranks

TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nano(tmp_path_factory.mktemp("nano") / "checkpoint")


def build(checkpoint: Path, folder: Path, failing: str) -> tuple[Any, dict[int, str]]:
    output = folder / "out" / "engine"
    arguments = ["-m", "tests.engine.ranks.plan_building", str(checkpoint), str(output), str(folder), failing]
    finished = run_ranks(2, arguments, timeout_s=TIMEOUT_S, environment=rank_environment())
    outcomes = {rank: folder / f"outcome-{rank}" for rank in range(2)}
    return finished, {rank: path.read_text() for rank, path in outcomes.items() if path.exists()}


@pytest.mark.usefixtures("rtx")
def test_a_killed_rank_ends_the_job_and_the_next_build_clears_up_and_publishes(
    checkpoint: Path, tmp_path: Path
) -> None:
    finished, outcomes = build(checkpoint, tmp_path, "killed")
    assert finished.returncode != 0
    assert "built" not in outcomes.values()
    output = tmp_path / "out" / "engine"
    assert not output.exists()

    finished, outcomes = build(checkpoint, tmp_path, "nothing")
    assert finished.returncode == 0, finished.stderr
    assert outcomes == {0: "built", 1: "built"}
    assert [path.name for path in output.parent.iterdir()] == ["engine"]
    manifest, geometry = read_manifest(output)
    assert manifest.tp_size == 2
    assert manifest.plans is not None
    # This builder counts its versions from 1.
    assert manifest.plans.collectives == "plugin"
    plans = [plan_path(spec) for spec in specs("nano", world=2)]
    for rank in manifest.ranks:
        check_files(output, rank.files, digests=True)
        own = [file.path for file in rank.files if file.path.startswith(f"rank-{rank.rank:04d}/")]
        assert [file.path for file in rank.files] == own + plans
        assert len(own) == geometry.layers + 1
