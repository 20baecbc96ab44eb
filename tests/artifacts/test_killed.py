"""Writers that are killed: the store opens, what was published verifies, nothing else is visible."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.artifacts.process_ranks import kill_ranks
from tests.artifacts.processes import Child
from tests.artifacts.support import MOST_CHANGES, KillingFiles, build_artifact, check_store
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.artifacts.files import Files
from trt_redknot.collectives import LocalCollectives

LOCAL = LocalCollectives()
OLD, NEW = [1] * 21, [2] * 21
RANDOM_KILLS = 24
RANK_KILLS = 10


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # A forked child has none of its parent's threads, so torch must not count on them.
    torch.set_num_threads(1)


def kill_at_every_change(root: Path, work: Callable[[Files], object], kept: str) -> int:
    """Run `work` in processes that are killed at their first, second, ... change of the disk, until one survives."""
    for at in range(MOST_CHANGES):
        child = Child(lambda _, at=at: work(KillingFiles(at)))
        status = child.wait()
        check_store(root, kept)
        if status == 0:
            return at
        assert status == -9, status
    raise AssertionError("no process ever survived")


def test_a_build_killed_at_any_change_of_the_disk(tmp_path: Path) -> None:
    kept = build_artifact(ArtifactStore(tmp_path), OLD, LOCAL)

    def work(files: Files) -> None:
        build_artifact(ArtifactStore(tmp_path, files=files), NEW, LOCAL, rebuild=True)

    assert kill_at_every_change(tmp_path, work, kept) > 20


def test_an_eviction_killed_at_any_change_of_the_disk(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept = build_artifact(store, OLD, LOCAL)
    store.pin(kept)
    capacity = 2 * store.stat().bytes + 500
    numbers = iter(range(3, MOST_CHANGES))

    def work(files: Files) -> None:
        limited = ArtifactStore(tmp_path, capacity_bytes=capacity, files=files)
        build_artifact(limited, [next(numbers) + os.getpid() % 100] * 21, LOCAL)

    build_artifact(ArtifactStore(tmp_path, capacity_bytes=capacity), NEW, LOCAL)
    assert kill_at_every_change(tmp_path, work, kept) > 20


def test_removal_killed_at_any_change_of_the_disk(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept = build_artifact(store, OLD, LOCAL)

    def work(files: Files) -> None:
        victim = ArtifactStore(tmp_path, files=files)
        victim.rm(build_artifact(store, NEW, LOCAL))

    assert kill_at_every_change(tmp_path, work, kept) >= 2


def kill_at_random_instants(root: Path, *, trials: int, seed: int) -> int:
    """Builds in processes that are killed at any instant, in the middle of a system call too; how many survived."""
    draw, store = random.Random(seed), ArtifactStore(root)
    kept = build_artifact(store, OLD, LOCAL)
    published = build_artifact(store, NEW, LOCAL)
    whole = min(_seconds_of_a_build(root) for _ in range(3))
    survived = 0
    for _ in range(trials):
        child = Child(lambda _: build_artifact(ArtifactStore(root), NEW, LOCAL, rebuild=True))
        time.sleep(draw.uniform(0, 1.1 * whole))
        os.kill(child.pid, 9)
        survived += child.wait() == 0
        assert check_store(root, kept) == {kept, published}
    return survived


def _seconds_of_a_build(root: Path) -> float:
    """Of a whole child, its start and end included."""
    started = time.monotonic()
    assert Child(lambda _: build_artifact(ArtifactStore(root), NEW, LOCAL, rebuild=True)).wait() == 0
    return time.monotonic() - started


def test_builds_killed_at_random_instants(tmp_path: Path) -> None:
    assert kill_at_random_instants(tmp_path, trials=RANDOM_KILLS, seed=random.randrange(2**31)) < RANDOM_KILLS


def test_gc_pins_and_quotas_killed_at_any_change_of_the_disk(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept = build_artifact(store, OLD, LOCAL)

    def work(files: Files) -> None:
        victim = ArtifactStore(tmp_path, files=files)
        build_artifact(store, OLD, LOCAL, rebuild=True)
        victim.set_quota(10**9)
        victim.pin(kept)
        victim.unpin(kept)
        victim.gc()
        victim.set_quota(None)

    assert kill_at_every_change(tmp_path, work, kept) > 8
    assert store.stat().capacity_bytes is None


def test_any_rank_of_a_build_killed_at_a_random_change(tmp_path: Path) -> None:
    tally = kill_ranks(tmp_path / "store", trials=RANK_KILLS, seed=random.randrange(2**31))
    assert tally.trials == RANK_KILLS
    assert tally.killed > 0
