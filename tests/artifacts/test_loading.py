"""Background loads: one result each, buffers given back with it, deadlines that hold on a disk that hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.artifacts.support import GEOMETRY, PROFILE, build_on_ranks, identity, part_values
from trt_redknot.artifacts import ArtifactFault, ArtifactFormat, ArtifactStore, Lease, Part, PartSpec, artifact_parts
from trt_redknot.artifacts.faults import ArtifactError
from trt_redknot.artifacts.files import Files
from trt_redknot.artifacts.loading import ArtifactLoader, Load, LoadResult, LoadState

TOKENS = list(range(37))
SIZE = 2
SPECS = artifact_parts(GEOMETRY, PROFILE, len(TOKENS), SIZE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loading")


@pytest.fixture(scope="module")
def artifact_id(root: Path) -> str:
    return build_on_ranks(root, TOKENS, SIZE)


@pytest.fixture
def lease(root: Path, artifact_id: str) -> Iterator[Lease]:
    with ArtifactStore(root).open(artifact_id, rank=1, verify=False) as held:
        yield held


def load_of(lease: Lease, spec: PartSpec, **options: object) -> Load:
    rows = options.get("rows")
    count = spec.shape[0] if rows is None else len(rows)  # type: ignore[arg-type]
    buffer = torch.full((count, *spec.shape[1:]), float("nan"))
    return Load(key=(spec.part, spec.layer), lease=lease, part=spec.part, layer=spec.layer, buffer=buffer, **options)  # type: ignore[arg-type]


def test_every_part_arrives_in_its_buffer(lease: Lease) -> None:
    with ArtifactLoader(threads=3) as loader:
        loads = [load_of(lease, spec, deadline_s=60.0) for spec in SPECS]
        tickets = loader.submit(loads)
        results = loader.wait(tickets, 60.0)
        assert [result.ticket for result in results] == sorted(tickets)
        assert [(result.key, result.state, result.error) for result in results] == [
            (load.key, LoadState.LOADED, None) for load in loads
        ]
        assert all(0 <= result.seconds < 60 for result in results)
        assert loader.poll() == []
        assert loader.pending == 0
    for spec, load in zip(SPECS, loads, strict=True):
        assert torch.equal(load.buffer, part_values(spec, 1))


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=60), st.booleans())
def test_rows_in_any_order_and_dtype(lease: Lease, rows: list[int], narrow: bool) -> None:
    spec = next(spec for spec in SPECS if spec.part is Part.STREAMS)
    dtype = torch.bfloat16 if narrow else torch.float32
    index = torch.tensor(rows, dtype=torch.int64)
    buffer = torch.empty((len(rows), *spec.shape[1:]), dtype=dtype)
    with ArtifactLoader(threads=1) as loader:
        load = Load(key=0, lease=lease, part=spec.part, layer=None, buffer=buffer, rows=index)
        (result,) = loader.wait(loader.submit([load]), 30.0)
    assert result.state is LoadState.LOADED
    assert torch.equal(buffer, part_values(spec, 1)[index].to(dtype))


def test_packed_tensors_are_decoded(tmp_path: Path) -> None:
    packed = build_on_ranks(tmp_path, TOKENS, 1, who=identity(ArtifactFormat.FP8))
    with ArtifactStore(tmp_path).open(packed, rank=0) as held, ArtifactLoader() as loader:
        specs = [spec for spec in artifact_parts(GEOMETRY, PROFILE, len(TOKENS), 1) if spec.part is not Part.BOUNDARY]
        loads = [load_of(held, spec) for spec in specs]
        assert {result.state for result in loader.wait(loader.submit(loads), 30.0)} == {LoadState.LOADED}
        for load in loads:
            assert torch.equal(load.buffer, held.tensor(load.part, load.layer, torch.float32))


def test_what_fails_is_data_and_spoils_no_other_load(tmp_path: Path) -> None:
    spoiled = build_on_ranks(tmp_path, TOKENS, 1)
    specs = artifact_parts(GEOMETRY, PROFILE, len(TOKENS), 1)
    path = next(tmp_path.rglob("streams.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    latents, streams = (next(s for s in specs if s.part is part) for part in (Part.LATENTS, Part.STREAMS))
    closed = ArtifactStore(tmp_path).open(spoiled, rank=0, verify=False)
    closed.close()
    with ArtifactStore(tmp_path).open(spoiled, verify=False) as held, ArtifactLoader() as loader:
        wrong = Load(key="shape", lease=held, part=latents.part, layer=0, buffer=torch.empty(3, 3))
        unranked = load_of(held, next(s for s in specs if s.part is Part.LOCAL))
        outside = load_of(held, latents, rows=torch.tensor([len(TOKENS)]))
        loads = [load_of(held, streams), wrong, unranked, outside, load_of(closed, latents), load_of(held, latents)]
        results = loader.wait(loader.submit(loads), 30.0)
    states = [result.state for result in results]
    assert states == [LoadState.FAILED] * 5 + [LoadState.LOADED]
    assert isinstance(results[0].error, ArtifactError)
    assert results[0].error.fault is ArtifactFault.FILE_DIGEST
    for result, text in zip(results[1:5], ("another shape", "without a rank", "rows 37", "closed"), strict=True):
        assert text in str(result.error)
    assert torch.equal(loads[-1].buffer, part_values(latents, 0))


class HangingFiles(Files):
    """Reading whole chunks waits until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) > 1 << 20:
            self.entered.set()
            assert self.release.wait(60.0)
        return super().read_into(fd, buffer, offset)


@pytest.fixture
def hanging(root: Path, artifact_id: str) -> Iterator[tuple[HangingFiles, Lease]]:
    disk = HangingFiles()
    with ArtifactStore(root, files=disk).open(artifact_id, rank=1, verify=False) as held:
        yield disk, held
        disk.release.set()


def test_a_deadline_holds_while_the_disk_hangs_and_the_buffer_is_free(hanging: tuple[HangingFiles, Lease]) -> None:
    disk, held = hanging
    load = load_of(held, SPECS[0], deadline_s=0.05)
    with ArtifactLoader(threads=1) as loader:
        tickets = loader.submit([load])
        assert disk.entered.wait(30.0)
        (result,) = loader.wait(tickets)
        assert (result.state, result.error) == (LoadState.LATE, None)
        load.buffer.fill_(7.0)
        disk.release.set()
        # The thread goes on to the next load only after it has left the late one behind.
        again = load_of(held, SPECS[0])
        (second,) = loader.wait(loader.submit([again]), 30.0)
        assert second.state is LoadState.LOADED
        assert torch.equal(again.buffer, part_values(SPECS[0], 1))
        assert bool((load.buffer == 7.0).all())
        assert loader.poll() == []


def test_a_load_that_never_started_in_time_is_late(hanging: tuple[HangingFiles, Lease]) -> None:
    disk, held = hanging
    with ArtifactLoader(threads=1) as loader:
        first = loader.submit([load_of(held, SPECS[0])])
        assert disk.entered.wait(30.0)
        late = loader.submit([load_of(held, SPECS[1], deadline_s=0.0)])
        assert [result.state for result in loader.poll(late)] == [LoadState.LATE]
        assert loader.poll(first) == []
        assert loader.wait(first, 0.05) == []
        disk.release.set()
        assert [result.state for result in loader.wait(first, 30.0)] == [LoadState.LOADED]


def test_cancelled_and_closed_loads_have_their_result_too(hanging: tuple[HangingFiles, Lease]) -> None:
    disk, held = hanging
    loader = ArtifactLoader(threads=1)
    loads = [load_of(held, spec) for spec in SPECS[:4]]
    tickets = loader.submit(loads)
    assert disk.entered.wait(30.0)
    loader.cancel(tickets[:2])
    assert [result.state for result in loader.poll()] == [LoadState.CANCELLED] * 2
    loader.close()
    loader.close()
    assert [result.state for result in loader.wait(tickets[2:], 1.0)] == [LoadState.CANCELLED] * 2
    with pytest.raises(ValueError, match="closed"):
        loader.submit(loads)
    disk.release.set()
    time.sleep(0.05)
    assert all(bool(load.buffer.isnan().all()) for load in loads)


def test_the_loads_of_many_threads_keep_apart(root: Path, artifact_id: str) -> None:
    seen: list[LoadResult] = []

    def ask(loader: ArtifactLoader, held: Lease, owner: int) -> None:
        loads = [
            Load(key=owner, lease=held, part=s.part, layer=s.layer, buffer=torch.empty(s.shape)) for s in SPECS[:5]
        ]
        seen.extend(loader.wait(loader.submit(loads), 60.0))
        for spec, load in zip(SPECS[:5], loads, strict=True):
            assert torch.equal(load.buffer, part_values(spec, 1))

    with ArtifactStore(root).open(artifact_id, rank=1, verify=False) as held, ArtifactLoader(threads=4) as loader:
        threads = [threading.Thread(target=ask, args=(loader, held, owner)) for owner in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert sorted(result.key for result in seen) == [owner for owner in range(6) for _ in range(5)]  # type: ignore[type-var]
    assert {result.state for result in seen} == {LoadState.LOADED}


def test_no_descriptor_is_left(root: Path, artifact_id: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ArtifactStore(root).open(artifact_id, rank=1, verify=False) as held, ArtifactLoader() as loader:
        loader.wait(loader.submit([load_of(held, spec) for spec in SPECS]), 60.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_misuse_is_told(lease: Lease) -> None:
    with pytest.raises(ValueError, match="threads"):
        ArtifactLoader(threads=0)
    with ArtifactLoader() as loader:
        slanted = torch.empty(48, 37).t()
        with pytest.raises(ValueError, match="contiguous"):
            loader.submit([Load(key=1, lease=lease, part=Part.LATENTS, layer=0, buffer=slanted)])
        assert loader.pending == 0


def test_a_bug_in_a_load_leaves_nobody_waiting(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: caught.append(arguments.exc_value))
    monkeypatch.setattr(lease, "check", lambda *_: 1 / 0)
    loader = ArtifactLoader(threads=1)
    results = loader.wait(loader.submit([load_of(lease, spec) for spec in SPECS[:3]]), 30.0)
    assert [result.state for result in results] == [LoadState.CANCELLED] * 3
    assert [type(each) for each in caught] == [ZeroDivisionError]
