"""Quotas bind every process of a namespace and no other one; restarts evict nothing; time may run backwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.artifacts.support import build_artifact
from trt_redknot.artifacts import ArtifactStore, files, usage
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import CapacityError, StoreError

LOCAL = LocalCollectives()


def document(number: int) -> list[int]:
    return [number] * 20


def present(store: ArtifactStore) -> set[str]:
    return {listed.published.artifact_id for listed in store.ls()}


def size_of_one(root: Path) -> int:
    store = ArtifactStore(root, namespace="mine")
    build_artifact(store, document(0), LOCAL)
    return store.stat().bytes


def test_a_quota_binds_processes_that_do_not_know_it(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    root = tmp_path / "store"
    ArtifactStore(root, namespace="mine").set_quota(2 * one)
    other = ArtifactStore(root, namespace="else", capacity_bytes=10 * one)
    for number in range(4):
        # A new object each time, as a new process would have.
        build_artifact(ArtifactStore(root, namespace="mine"), document(number), LOCAL)
        build_artifact(other, document(number), LOCAL)
    mine = ArtifactStore(root, namespace="mine")
    assert mine.stat().capacity_bytes == 2 * one
    assert mine.stat().bytes <= 2 * one
    assert len(present(mine)) == 2
    assert len(present(other)) == 4
    for listed in mine.ls():
        mine.pin(listed.published.artifact_id)
    with pytest.raises(CapacityError, match=f"capacity of {2 * one}"):
        build_artifact(ArtifactStore(root, namespace="mine"), document(9), LOCAL)
    build_artifact(other, document(9), LOCAL)


@pytest.mark.parametrize(("own", "quota", "wanted"), [(None, 5, 5), (7, None, 7), (7, 5, 5), (5, 7, 5), (None,) * 3])
def test_the_smaller_limit_counts(tmp_path: Path, own: int | None, quota: int | None, wanted: int | None) -> None:
    store = ArtifactStore(tmp_path, capacity_bytes=own)
    store.set_quota(9)
    store.set_quota(quota)
    store.set_quota(quota)
    assert store.stat().capacity_bytes == wanted


@pytest.mark.parametrize("content", ["", "{", "[]", '{"capacity_bytes": "1"}', '{"capacity_bytes": -1}', "{}"])
def test_a_spoiled_quota_stops_builds_and_says_so(tmp_path: Path, content: str) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, document(0), LOCAL)
    store.set_quota(10**9)
    (tmp_path / ".quotas" / "default.json").write_text(content)
    with pytest.raises(StoreError, match=r"quota.*malformed"):
        build_artifact(store, document(1), LOCAL)
    store.open(artifact_id, rank=0).close()
    store.set_quota(None)
    build_artifact(store, document(1), LOCAL)


def test_a_quota_is_read_as_what_anybody_may_have_put_there(tmp_path: Path) -> None:
    """Nobody waits for the other end of a pipe, a link leads nowhere, and no more is read than a quota can be."""
    store = ArtifactStore(tmp_path / "store")
    store.set_quota(10**9)
    record = tmp_path / "store" / ".quotas" / "default.json"
    content = record.read_bytes()
    os.truncate(record, 1 << 40)
    with pytest.raises(StoreError, match=r"quota.*malformed"):
        store.stat()
    record.unlink()
    (tmp_path / "elsewhere.json").write_bytes(content)
    record.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(StoreError, match=r"cannot be used.*default\.json"):
        store.stat()
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(StoreError, match="cannot be used"):
        store.stat()


@pytest.mark.parametrize("quota", [0, -5])
def test_a_quota_is_positive(tmp_path: Path, quota: int) -> None:
    with pytest.raises(StoreError, match="not positive"):
        ArtifactStore(tmp_path).set_quota(quota)


def test_opening_and_lowering_evict_nothing_and_a_build_no_more_than_it_needs(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    root = tmp_path / "store"
    ids = [build_artifact(ArtifactStore(root, namespace="mine"), document(number), LOCAL) for number in range(6)]
    again = ArtifactStore(root, namespace="mine", capacity_bytes=4 * one)
    again.set_quota(4 * one)
    again.open(ids[0]).close()
    again.gc()
    assert present(again) == set(ids)
    ids.append(build_artifact(again, document(6), LOCAL))
    # Room for four: three of the six had to go, the least recently used ones; the first was just read.
    assert present(again) == {ids[0], ids[4], ids[5], ids[6]}


def test_a_clock_that_is_moved_back_does_not_change_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = size_of_one(tmp_path / "probe")
    store = ArtifactStore(tmp_path / "store", namespace="mine", capacity_bytes=3 * one)
    day = 86_400 * 10**9
    now = usage.time.time_ns()
    ids = []
    for number, back in enumerate((0, 3, 8)):
        monkeypatch.setattr(usage.time, "time_ns", lambda back=back: now - back * day)
        ids.append(build_artifact(store, document(number), LOCAL))
    monkeypatch.setattr(usage.time, "time_ns", lambda: now - 30 * day)
    store.open(ids[0]).close()
    ids.append(build_artifact(store, document(3), LOCAL))
    assert present(store) == {ids[0], ids[2], ids[3]}
    monkeypatch.undo()
    # And when it is put right again, what was used meanwhile is not suddenly old.
    store.open(ids[2]).close()
    ids.append(build_artifact(store, document(4), LOCAL))
    assert present(store) == {ids[2], ids[3], ids[4]}


def test_use_without_a_writable_clock_is_still_recorded(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, document(0), LOCAL)
    (tmp_path / ".locks" / "clock").unlink()
    (tmp_path / ".locks" / "clock").mkdir()
    lock = store.ls()[0].published.path / "lease.lock"
    os.utime(lock, (1000.0, 1000.0))
    store.open(artifact_id).close()
    assert lock.stat().st_mtime > 1e9
    assert isinstance(store._folder.files, files.Files)
