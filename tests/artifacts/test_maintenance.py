"""Corruption is found, named, quarantined and never served; ls, verify, gc, rm, pin do what they say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.artifacts.support import build_artifact, identity
from trt_redknot.artifacts import ArtifactError, ArtifactFault, ArtifactStore, Part
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError

TOKENS = list(range(21))
GROUP = "common/group-000.safetensors"


def built(root: Path, tokens: list[int] | None = None) -> tuple[ArtifactStore, str, Path]:
    store = ArtifactStore(root)
    artifact_id = build_artifact(store, tokens or TOKENS, LocalCollectives())
    return store, artifact_id, root / "default" / artifact_id / "gen-00000001"


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path) -> None:
    outside = path.parents[4] / "outside"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)


def folder_to_link(path: Path) -> None:
    outside = path.parents[4] / "elsewhere"
    path.parent.rename(outside)
    path.parent.symlink_to(outside)


def flipped(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    path.write_bytes(raw)


DAMAGE: dict[str, tuple[Callable[[Path], object], ArtifactFault]] = {
    "deleted": (Path.unlink, ArtifactFault.FILE_MISSING),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), ArtifactFault.FILE_SIZE),
    "emptied": (lambda path: os.truncate(path, 0), ArtifactFault.FILE_SIZE),
    "lengthened": (lambda path: os.truncate(path, path.stat().st_size + 8), ArtifactFault.FILE_SIZE),
    "flipped": (lambda path: flipped(path, 4321), ArtifactFault.FILE_DIGEST),
    "zeroed": (lambda path: path.write_bytes(bytes(path.stat().st_size)), ArtifactFault.FILE_DIGEST),
    "huge header": (
        lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
        ArtifactFault.FILE_DIGEST,
    ),
    "a folder": (to_folder, ArtifactFault.FILE_NOT_REGULAR),
    "a pipe": (to_fifo, ArtifactFault.FILE_NOT_REGULAR),
    "a link out": (to_link, ArtifactFault.FILE_NOT_REGULAR),
    "below a link out": (folder_to_link, ArtifactFault.FILE_NOT_REGULAR),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_quarantined(tmp_path: Path, case: str) -> None:
    store, artifact_id, folder = built(tmp_path)
    damage, fault = DAMAGE[case]
    damage(folder / GROUP)
    with pytest.raises(ArtifactError) as caught:
        store.open(artifact_id, rank=0)
    assert caught.value.fault is fault
    assert GROUP in str(caught.value)
    # Without the check at open the file is still never served.
    with store.open(artifact_id, rank=0, verify=False) as lease, pytest.raises(ArtifactError):
        lease.tensor(Part.LATENTS, 0)
    (kept,) = store.verify(quarantine=False)
    assert not kept.sound
    assert folder.exists()
    (verdict,) = store.verify()
    assert any(GROUP in each and each.startswith(fault) for each in verdict.faults)
    assert verdict.quarantined is not None
    reason = json.loads((verdict.quarantined / "reason.json").read_text())
    assert reason["artifact_id"] == artifact_id
    assert GROUP in reason["reason"]
    assert store.ls() == []
    assert store.stat().quarantined == 1
    assert store.gc().quarantined == 0
    assert store.gc(quarantine=True).quarantined == 1
    assert store.stat().quarantined == 0


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_to_any_file_is_refused_and_recovered_from(tmp_path: Path, case: str) -> None:
    _, artifact_id, folder = built(tmp_path / "whole")
    files = [path.relative_to(tmp_path / "whole") for path in folder.rglob("*") if path.name != "lease.lock"]
    for number, name in enumerate(path for path in files if path.suffix):
        root = tmp_path / str(number) / "below" / "store"
        shutil.copytree(tmp_path / "whole", root)
        DAMAGE[case][0](root / name)
        store = ArtifactStore(root)
        with pytest.raises(ArtifactError):
            store.open(artifact_id, rank=0)
        assert not any(verdict.sound for verdict in store.verify())
        assert build_artifact(store, TOKENS, LocalCollectives()) == artifact_id
        with store.open(artifact_id, rank=0) as lease:
            assert lease.tokens().tolist() == TOKENS
        assert all(verdict.sound for verdict in store.verify())
    assert number >= 5


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_of_any_file_is_found(tmp_path: Path, data: st.DataObject) -> None:
    store, artifact_id, folder = built(tmp_path / str(len(list(tmp_path.iterdir()))))
    with store.open(artifact_id, rank=0):
        pass
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = data.draw(st.sampled_from(files))
    flipped(path, data.draw(st.integers(0, 8 * path.stat().st_size - 1)))
    # The same store object: what it remembers of the file must not hide the change.
    with pytest.raises(ArtifactError):
        store.open(artifact_id, rank=0)
    assert not store.verify()[0].sound


def test_an_extra_file_is_reported(tmp_path: Path) -> None:
    store, _, folder = built(tmp_path)
    (folder / "common" / "more").write_text("x")
    (verdict,) = store.verify(quarantine=False)
    assert verdict.faults[0].startswith(ArtifactFault.FILE_EXTRA)


def test_a_generation_without_certificate_is_not_there(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path)
    (folder / "certificate.json").unlink()
    assert store.ls() == []
    with pytest.raises(ArtifactError) as caught:
        store.open(artifact_id)
    assert caught.value.fault is ArtifactFault.MISSING
    assert build_artifact(store, TOKENS, LocalCollectives()) == artifact_id
    with store.open(artifact_id) as lease:
        assert lease.generation == 2


def test_an_unread_hot_file_is_not_hashed_again(tmp_path: Path) -> None:
    store, artifact_id, _ = built(tmp_path)
    reads = 0
    original = store._folder.files.read_into

    def counting(fd: int, buffer: memoryview, offset: int) -> int:
        nonlocal reads
        reads += len(buffer) > 1 << 20
        return original(fd, buffer, offset)

    store._folder.files.read_into = counting  # type: ignore[method-assign]
    store.open(artifact_id, rank=0).close()
    first = reads
    store.open(artifact_id, rank=0).close()
    assert first > 0
    assert reads == first


def test_quarantined_tokens_still_prove_themselves(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path)
    flipped(folder / GROUP, 9999)
    assert store.verify()[0].quarantined is not None
    ids = store.read_tokens(artifact_id, identity())
    assert ids is not None
    assert ids.tolist() == TOKENS
    assert store.read_tokens(artifact_id, identity(checkpoint="c" * 64)) is None


def test_who_is_late_to_set_aside_finds_no_other_generation_of_that_number(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path)
    flipped(folder / GROUP, 9)
    assert store.quarantine(artifact_id, 1, "the first rank to say so") is not None
    build_artifact(store, TOKENS, LocalCollectives())
    assert store.quarantine(artifact_id, 1, "another rank, later") is None
    with store.open(artifact_id, rank=0) as lease:
        assert lease.generation == 2


def test_what_is_leased_is_neither_removed_nor_quarantined(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path)
    with store.open(artifact_id, rank=0) as lease:
        assert store.ls()[0].leased
        with pytest.raises(StoreError, match="in use"):
            ArtifactStore(tmp_path).rm(artifact_id)
        flipped(folder / GROUP, 77)
        assert store.verify()[0].quarantined is None
        assert lease.tensor(Part.LATENTS, 0).shape[0] == len(TOKENS)
    assert not store.ls()[0].leased
    assert [found.generation for found in store.rm(artifact_id)] == [1]
    assert not folder.parent.exists()
    assert list((tmp_path / ".trash").iterdir()) == []


def test_pins_hold(tmp_path: Path) -> None:
    store, artifact_id, _ = built(tmp_path)
    store.pin(artifact_id)
    store.pin(artifact_id)
    assert store.stat().pinned_bytes == store.stat().bytes > 0
    with pytest.raises(StoreError, match="pinned"):
        store.rm(artifact_id)
    build_artifact(store, TOKENS, LocalCollectives(), rebuild=True)
    assert store.gc().superseded == 0
    store.unpin(artifact_id)
    store.unpin(artifact_id)
    assert store.gc().superseded == 1
    assert [found.generation for found in store.rm(artifact_id)] == [2]
    for operation in (store.pin, store.unpin, store.rm, store.inspect, store.verify):
        with pytest.raises(ArtifactError, match="no artifact"):
            operation(artifact_id)


def test_gc_keeps_what_is_leased(tmp_path: Path) -> None:
    store, artifact_id, _ = built(tmp_path)
    with store.open(artifact_id, generation=1):
        build_artifact(store, TOKENS, LocalCollectives(), rebuild=True)
        assert store.gc().superseded == 0
    assert store.gc().superseded == 1
    assert [listed.published.generation for listed in store.ls()] == [2]


def test_one_generation_can_be_removed(tmp_path: Path) -> None:
    store, artifact_id, _ = built(tmp_path)
    build_artifact(store, TOKENS, LocalCollectives(), rebuild=True)
    with pytest.raises(ArtifactError):
        store.rm(artifact_id, generation=3)
    assert [found.generation for found in store.rm(artifact_id, generation=2)] == [2]
    with store.open(artifact_id) as lease:
        assert lease.generation == 1


def test_a_linked_artifact_is_not_followed(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path / "store")
    folder.parent.rename(tmp_path / "outside")
    folder.parent.symlink_to(tmp_path / "outside")
    assert store.ls() == []
    with pytest.raises(ArtifactError):
        store.open(artifact_id)
    store.gc(quarantine=True)
    assert (tmp_path / "outside" / "gen-00000001" / GROUP).exists()
    with pytest.raises(StoreError, match="a link lies where"):
        build_artifact(store, TOKENS, LocalCollectives())
    assert len(list((tmp_path / "outside").iterdir())) == 1
    assert store.stat().reserved_bytes == 0
    folder.parent.unlink()
    build_artifact(store, TOKENS, LocalCollectives())
    assert len(store.ls()) == 1


def test_a_malformed_certificate_is_listed_as_such(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path)
    (folder / "certificate.json").write_text("{}")
    (listed,) = store.inspect(artifact_id)
    assert listed.certificate is None
    assert "version" in str(listed.fault)
    assert not store.verify()[0].sound
    assert store.ls() == []


def test_rows_are_read_sparsely(tmp_path: Path) -> None:
    store, artifact_id, _ = built(tmp_path)
    with store.open(artifact_id, rank=0) as lease:
        raw = lease.raw(Part.STREAMS, None)
        assert raw.shape[0] == len(TOKENS)
        assert raw.untyped_storage().nbytes() == (lease.path / "common/streams.safetensors").stat().st_size
        rows = lease.rows(Part.STREAMS, None, torch.tensor([5, 5, 0]))
        assert torch.equal(rows, raw[torch.tensor([5, 5, 0])])


def test_a_generation_that_lost_its_certificate_is_set_aside_by_verify(tmp_path: Path) -> None:
    store, artifact_id, folder = built(tmp_path)
    (folder / "certificate.json").unlink()
    (verdict,) = store.verify(artifact_id)
    assert verdict.faults[0].startswith(ArtifactFault.CERTIFICATE_MISSING)
    assert verdict.quarantined is not None
    assert not folder.exists()


def test_listing_and_verifying_do_not_count_as_use(tmp_path: Path) -> None:
    store, _, folder = built(tmp_path)
    os.utime(folder / "lease.lock", (1000.0, 1000.0))
    assert store.ls()[0].published.last_used == 1000.0
    assert store.verify()[0].sound
    assert store.ls()[0].published.last_used == 1000.0


def test_inference_mode_changes_nothing(tmp_path: Path) -> None:
    with torch.inference_mode():
        store, artifact_id, _ = built(tmp_path)
        with store.open(artifact_id, rank=0) as lease:
            inside = lease.tensor(Part.LATENTS, 1) * 2
    with store.open(artifact_id, rank=0) as lease:
        assert torch.equal(lease.tensor(Part.LATENTS, 1) * 2, inside)
