"""Verification ahead of time: admission finds nothing left to read, and nothing stays held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.support import Bench, ids, open_leases
from trt_redknot import Artifact, ArtifactStore, Request, Tokens
from trt_redknot.artifacts.lease import Lease
from trt_redknot.observability.events import NoEvents, Tier
from trt_redknot.serving.preload import Preloader


class Reading(NoEvents):
    """Bytes that were hashed."""

    def __init__(self) -> None:
        self.bytes = 0

    def moved(self, tier: Tier, bytes: int) -> None:
        self.bytes += bytes if tier is Tier.DISK else 0


@pytest.fixture
def built(bench: Bench, tmp_path: Path) -> tuple[Path, list[str]]:
    """A store of its own, whose files nobody in this process has read."""
    writer = ArtifactStore(tmp_path / "store")
    return writer.root, [bench.engine.build_artifact(writer, ids(20 + number)) for number in range(2)]


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_admission_finds_everything_verified(bench: Bench, built: tuple[Path, list[str]]) -> None:
    root, artifact_ids = built
    reading = Reading()
    store = ArtifactStore(root, events=reading)
    preloader = Preloader(0, threads=2)
    preloader.submit(7, store, [*artifact_ids, artifact_ids[0]])
    assert wait_for(preloader.finished) == [7]
    assert preloader.finished() == []
    assert preloader.held == len(open_leases()) == 2
    read = reading.bytes
    assert read > 0
    segments = [*map(Artifact, artifact_ids), Tokens([1, 2])]
    admitted = bench.engine.admit(Request(segments=segments), store)
    assert admitted.reuses
    assert reading.bytes == read, "admission read files again"
    preloader.release(7)
    assert preloader.held == 0
    assert len(open_leases()) == 2
    admitted.close()
    admitted.close()
    preloader.release(7)
    assert not open_leases()
    preloader.close()


def test_what_cannot_be_opened_is_left_to_admission(bench: Bench, built: tuple[Path, list[str]]) -> None:
    root, artifact_ids = built
    store = ArtifactStore(root)
    next(root.rglob("streams.safetensors")).write_bytes(b"x")
    preloader = Preloader(0, threads=1)
    preloader.submit(1, store, ["0" * 32, *artifact_ids, "nonsense/.."])
    assert wait_for(preloader.finished) == [1]
    assert preloader.held == 1
    preloader.close()
    assert not open_leases()


def test_a_job_that_is_let_go_while_it_is_verified(
    built: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leases are closed by whoever comes later, and it is never reported."""
    root, artifact_ids = built
    entered, go_on = threading.Event(), threading.Event()
    verify = Lease.verify

    def slow(self: Lease, *more: Any) -> None:
        entered.set()
        assert go_on.wait(30)
        verify(self, *more)

    monkeypatch.setattr(Lease, "verify", slow)
    preloader = Preloader(0, threads=1)
    preloader.submit(1, ArtifactStore(root), artifact_ids)
    assert entered.wait(30)
    preloader.release(1)
    go_on.set()
    preloader.submit(2, ArtifactStore(root), [])
    assert wait_for(preloader.finished) == [2]
    assert not open_leases()
    preloader.close()


def test_a_fault_that_nobody_foresaw_costs_one_job_and_no_thread(
    built: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job goes on to its admission, which looks itself."""
    root, artifact_ids = built
    store = ArtifactStore(root)
    with monkeypatch.context() as broken:
        broken.setattr(Lease, "verify", lambda *_: 1 // 0)
        preloader = Preloader(0, threads=1)
        preloader.submit(1, store, artifact_ids)
        assert wait_for(preloader.finished) == [1]
    assert "job 1 could not be verified" in caplog.text
    assert preloader.held == 0
    preloader.submit(2, store, artifact_ids)
    assert wait_for(preloader.finished) == [2]
    assert preloader.held == len(artifact_ids)
    preloader.close()
    assert not open_leases()
