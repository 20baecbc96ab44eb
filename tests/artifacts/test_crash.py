"""Writers that are killed and disks that fail: the store opens, what was published verifies, nothing else is visible."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.artifacts.processes import Child
from tests.artifacts.support import FailingFiles, KillingFiles, build_artifact, together
from trt_redknot.artifacts import ArtifactError, ArtifactFault, ArtifactStore
from trt_redknot.artifacts.files import Files
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError

LOCAL = LocalCollectives()
OLD, NEW = [1] * 21, [2] * 21
RANDOM_KILLS = 40
MOST_CHANGES = 400


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    # A forked child has none of its parent's threads, so torch must not count on them.
    torch.set_num_threads(1)


def check_store(root: Path, kept: str) -> set[str]:
    """Everything visible is whole, `kept` is among it, nothing half done survives gc. Ids of what is visible."""
    store = ArtifactStore(root)
    assert all(verdict.sound for verdict in store.verify(quarantine=False))
    store.open(kept, rank=0).close()
    store.gc()
    for leftover in (".building", ".trash"):
        assert not (root / leftover).exists() or not list((root / leftover).iterdir())
    assert store.stat().reserved_bytes == 0
    return {listed.published.artifact_id for listed in store.ls()}


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


def test_builds_killed_at_random_instants(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept = build_artifact(store, OLD, LOCAL)
    started = time.monotonic()
    published = build_artifact(store, NEW, LOCAL)
    whole = time.monotonic() - started
    survived = 0
    for trial in range(RANDOM_KILLS):
        child = Child(lambda _: build_artifact(ArtifactStore(tmp_path), NEW, LOCAL, rebuild=True))
        time.sleep(random.Random(trial).uniform(0, 1.2 * whole))
        os.kill(child.pid, 9)
        survived += child.wait() == 0
        assert check_store(tmp_path, kept) == {kept, published}
    assert survived < RANDOM_KILLS


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_at_any_change(tmp_path: Path, code: int) -> None:
    for at in range(MOST_CHANGES):
        root = tmp_path / str(at)
        kept = build_artifact(ArtifactStore(root), OLD, LOCAL)
        files = FailingFiles(at, code=code)
        try:
            made = build_artifact(ArtifactStore(root, files=files), NEW, LOCAL)
        except StoreError as error:
            assert os.strerror(code) in str(error)
            assert check_store(root, kept) == {kept}
        else:
            assert check_store(root, kept) == {kept, made}
            if files.calls <= at:
                return
    raise AssertionError("no build ever succeeded")


def test_a_disk_that_fails_for_good_leaves_a_sound_store(tmp_path: Path) -> None:
    kept = build_artifact(ArtifactStore(tmp_path), OLD, LOCAL)
    for at in range(MOST_CHANGES):
        files = FailingFiles(at, lasting=True)
        try:
            build_artifact(ArtifactStore(tmp_path, files=files), NEW, LOCAL, rebuild=True)
        except StoreError:
            check_store(tmp_path, kept)
        else:
            return
    raise AssertionError("no build ever succeeded")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_rank_out_of_space_fails_all_alike(tmp_path: Path, rank: int) -> None:
    for at in range(0, MOST_CHANGES, 3):
        root = tmp_path / str(at)
        disks = [FailingFiles(at if each == rank else MOST_CHANGES) for each in range(4)]
        results = together(
            4,
            lambda ranks, disks=disks, root=root: build_artifact(
                ArtifactStore(root, files=disks[ranks.rank]), NEW, ranks
            ),
        )
        visible = ArtifactStore(root).ls()
        if disks[rank].calls <= at:
            assert len(set(results)) == 1
            assert len(visible) == 1
            return
        if visible:
            # The failure came while cleaning up after publication.
            assert set(results) == {visible[0].published.artifact_id}
            continue
        assert all(type(result) is StoreError for result in results), results
        assert len({str(result) for result in results}) == 1
        assert f"rank {rank}" in str(results[0])
    raise AssertionError("no build ever succeeded")


class UnreadableFiles(Files):
    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) > 1 << 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_into(fd, buffer, offset)


def test_a_read_error_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    artifact_id = build_artifact(ArtifactStore(tmp_path), OLD, LOCAL)
    with pytest.raises(ArtifactError, match="cannot be read") as caught:
        ArtifactStore(tmp_path, files=UnreadableFiles()).open(artifact_id, rank=0)
    assert caught.value.fault is ArtifactFault.FILE_UNREADABLE
    ArtifactStore(tmp_path).open(artifact_id, rank=0).close()
