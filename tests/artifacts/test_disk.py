"""Disks that fail: every rank gets the same typed error, nothing half done is visible, reading never crashes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from tests.artifacts.support import MOST_CHANGES, FailingFiles, build_artifact, check_store, together
from trt_redknot.artifacts import ArtifactError, ArtifactFault, ArtifactStore
from trt_redknot.artifacts.files import Files
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError

LOCAL = LocalCollectives()
OLD, NEW = [1] * 21, [2] * 21


def attempt(root: Path, files: Files, tokens: list[int]) -> str | StoreError:
    try:
        return build_artifact(ArtifactStore(root, files=files), tokens, LOCAL, rebuild=True)
    except StoreError as error:
        return error


def test_a_disk_that_fails_at_any_change(tmp_path: Path) -> None:
    kept = build_artifact(ArtifactStore(tmp_path), OLD, LOCAL)
    codes = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES)
    for at in range(MOST_CHANGES):
        code = random.choice(codes)
        files = FailingFiles(at, code=code)
        # Another document each time, so that what one attempt published cannot pass for the next one's.
        outcome = attempt(tmp_path, files, [at] * 21)
        if isinstance(outcome, str):
            assert check_store(tmp_path, kept) == {kept, outcome}
            if files.calls <= at:
                return
            ArtifactStore(tmp_path).rm(outcome)
        else:
            assert os.strerror(code) in str(outcome)
            assert check_store(tmp_path, kept) == {kept}
    raise AssertionError("no build ever succeeded")


def test_a_disk_that_fails_for_good_leaves_a_sound_store(tmp_path: Path) -> None:
    kept = build_artifact(ArtifactStore(tmp_path), OLD, LOCAL)
    for at in range(MOST_CHANGES):
        outcome = attempt(tmp_path, FailingFiles(at, lasting=True), NEW)
        check_store(tmp_path, kept)
        if isinstance(outcome, str):
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
