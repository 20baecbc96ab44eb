"""Between processes: one build per artifact, leases that end with their process, builders that live are left alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.artifacts.processes import Child
from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, identity, part_values
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.artifacts.files import Files
from trt_redknot.artifacts.locks import acquire
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import BusyError, StoreError

LOCAL = LocalCollectives()
TOKENS = [5] * 30


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def slow_build(root: Path, tell: Callable[[], None], log: Path) -> None:
    """Builds part by part, so that the other process surely comes while it runs; notes in `log` whether it built."""
    with ArtifactStore(root).begin(
        TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LOCAL, wait_s=30.0
    ) as build:
        with log.open("a") as notes:
            notes.write("found\n" if build.exists else "built\n")
        if not build.exists:
            tell()
            for spec in build.specs:
                build.add(spec, part_values(spec, 0))
                time.sleep(0.02)
        build.publish()


def test_one_builds_the_other_waits_and_finds_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = Child(lambda tell: slow_build(tmp_path / "store", tell, log))
    first.wait_for_signal()
    others = [Child(lambda tell: slow_build(tmp_path / "store", tell, log)) for _ in range(3)]
    assert [child.wait() for child in (first, *others)] == [0] * 4
    assert sorted(log.read_text().split()) == ["built", "found", "found", "found"]
    assert [listed.published.generation for listed in ArtifactStore(tmp_path / "store").ls()] == [1]


def test_a_builder_that_dies_is_succeeded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = Child(lambda tell: slow_build(tmp_path / "store", tell, log))
    first.wait_for_signal()
    second = Child(lambda tell: slow_build(tmp_path / "store", tell, log))
    time.sleep(0.05)
    first.kill()
    assert second.wait() == 0
    assert sorted(log.read_text().split()) == ["built", "built"]
    store = ArtifactStore(tmp_path / "store")
    assert len(store.ls()) == 1
    assert store.verify()[0].sound
    assert store.gc().orphans.folders == 1


def hold_build(root: Path, tell: Callable[[], None]) -> None:
    with ArtifactStore(root).begin(TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LOCAL):
        tell()
        time.sleep(60)


def test_waiting_too_long_names_the_holder(tmp_path: Path) -> None:
    child = Child(lambda tell: hold_build(tmp_path, tell))
    child.wait_for_signal()
    try:
        with pytest.raises(StoreError, match=f"pid {child.pid} on {os.uname().nodename}"):
            build_artifact(ArtifactStore(tmp_path), TOKENS, LOCAL, wait_s=0.1)
        # Another artifact is built meanwhile.
        build_artifact(ArtifactStore(tmp_path), [6] * 30, LOCAL, wait_s=0.1)
    finally:
        child.kill()
    build_artifact(ArtifactStore(tmp_path), TOKENS, LOCAL, wait_s=5.0)


@pytest.mark.parametrize(
    "content", [b"", b"[" * 5000, b'{"pid": Infinity, "host": "h", "since": "s"}', b'{"pid": {}}', b"\xff"]
)
def test_a_holder_that_names_itself_wrongly_is_unknown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.lock"
    with acquire(Files(), path, what="it", timeout_s=0.0):
        path.write_bytes(content)
        with pytest.raises(BusyError, match="holder unknown"):
            acquire(Files(), path, what="it", timeout_s=0.0)


def test_gc_leaves_a_living_builder_alone(tmp_path: Path) -> None:
    child = Child(lambda tell: hold_build(tmp_path, tell))
    child.wait_for_signal()
    store = ArtifactStore(tmp_path)
    assert store.gc().orphans.folders == 0
    assert store.stat().reserved_bytes > 0
    child.kill()
    collected = store.gc().orphans
    assert collected.folders == 1
    assert store.stat().reserved_bytes == 0


def hold_lease(root: Path, artifact_id: str, tell: Callable[[], None]) -> None:
    with ArtifactStore(root).open(artifact_id, rank=0):
        tell()
        time.sleep(60)


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, TOKENS, LOCAL)
    child = Child(lambda tell: hold_lease(tmp_path, artifact_id, tell))
    child.wait_for_signal()
    with pytest.raises(StoreError, match=f"in use, found holder pid {child.pid} on {os.uname().nodename}"):
        store.rm(artifact_id)
    child.kill()
    assert len(store.rm(artifact_id)) == 1


def hold_for_removal(root: Path, tell: Callable[[], None]) -> None:
    folder = ArtifactStore(root)._folder
    (found,) = folder.all_published()
    with folder.try_own(found.path):  # type: ignore[union-attr]
        tell()
        time.sleep(60)


def test_a_reader_that_waits_too_long_is_told_who_removes(tmp_path: Path) -> None:
    artifact_id = build_artifact(ArtifactStore(tmp_path), TOKENS, LOCAL)
    child = Child(lambda tell: hold_for_removal(tmp_path, tell))
    child.wait_for_signal()
    try:
        with pytest.raises(StoreError, match=f"stayed locked.*holder pid {child.pid} on"):
            ArtifactStore(tmp_path).open(artifact_id, rank=0, timeout_s=0.1)
    finally:
        child.kill()
    ArtifactStore(tmp_path).open(artifact_id, rank=0, timeout_s=5.0).close()


def one_step(store: ArtifactStore, step: int) -> None:
    number = step % 4
    artifact_id = store.artifact_id([number] * 20, identity())
    if step % 3 == 0:
        build_artifact(store, [number] * 20, LOCAL, rebuild=step % 2 == 0)
    elif step % 7 == 0:
        store.rm(artifact_id)
    else:
        with store.open(artifact_id, rank=0) as lease:
            assert lease.tokens().tolist() == [number] * 20
            lease.verify()


def read_and_write(root: Path, seed: int) -> None:
    """Opens, rebuilds, removes and evicts in one store until done; what it opens must be whole."""
    store = ArtifactStore(root, capacity_bytes=200_000)
    refusals = []
    for step in range(seed, seed + 15):
        try:
            one_step(store, step)
        except StoreError as error:
            refusals.append(str(error))
    harmless = ("no artifact", "in use", "no room")
    unexpected = [refusal for refusal in refusals if not any(text in refusal for text in harmless)]
    assert unexpected == []


def test_readers_builders_and_removers_never_tear_an_artifact(tmp_path: Path) -> None:
    children = [Child(lambda _, seed=seed: read_and_write(tmp_path, seed)) for seed in range(6)]
    assert [child.wait() for child in children] == [0] * 6
    store = ArtifactStore(tmp_path)
    assert all(verdict.sound for verdict in store.verify())
    assert store.stat().reserved_bytes == 0
