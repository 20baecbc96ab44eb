"""Reading that fails: at each single read, in short pieces, without permission, while others remove."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.artifacts.processes import Child
from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, identity, part_values
from trt_redknot.artifacts import ArtifactError, ArtifactFault, ArtifactStore, artifact_parts
from trt_redknot.artifacts.files import Files
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import StoreError

LOCAL = LocalCollectives()
TOKENS = list(range(21))
NOBODY = 65534


class FailingReads(Files):
    """Raises at the n-th read or opening below the root, counted from 0."""

    def __init__(self, at: int, code: int) -> None:
        self.at = at
        self.code = code
        self.calls = 0

    def _count(self) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call == self.at:
            raise OSError(self.code, os.strerror(self.code))

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._count()
        return super().read_into(fd, buffer, offset)

    def open_beneath(self, folder: int, parts: object, flags: int) -> int:
        self._count()
        return super().open_beneath(folder, parts, flags)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_an_error_at_any_read_is_a_typed_refusal_and_nothing_is_lost(tmp_path: Path, code: int) -> None:
    artifact_id = build_artifact(ArtifactStore(tmp_path), TOKENS, LOCAL)
    before = len(os.listdir("/proc/self/fd"))
    reads = FailingReads(-1, code)
    ArtifactStore(tmp_path, files=reads).open(artifact_id, rank=0).close()
    assert reads.calls > 20
    for at in range(reads.calls):
        with pytest.raises(ArtifactError, match=os.strerror(code)) as caught:
            ArtifactStore(tmp_path, files=FailingReads(at, code)).open(artifact_id, rank=0)
        assert caught.value.fault is ArtifactFault.FILE_UNREADABLE
        del caught
        assert len(os.listdir("/proc/self/fd")) == before
    ArtifactStore(tmp_path).open(artifact_id, rank=0).close()
    assert ArtifactStore(tmp_path).stat().quarantined == 0


class ShortReads(Files):
    """Every read gives one byte or half of what was asked, as a network file system may."""

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        return super().read_into(fd, buffer[: max(1, len(buffer) // 2 if offset % 2 else len(buffer) // 3)], offset)


def test_short_reads_are_completed(tmp_path: Path) -> None:
    artifact_id = build_artifact(ArtifactStore(tmp_path), TOKENS, LOCAL)
    with ArtifactStore(tmp_path, files=ShortReads()).open(artifact_id, rank=0) as lease:
        for spec in artifact_parts(GEOMETRY, PROFILE, len(TOKENS), 1):
            assert torch.equal(lease.tensor(spec.part, spec.layer), part_values(spec, 0))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a user without privileges can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def without_privileges(work: Callable[[], object]) -> None:
    """Run `work` where permission bits mean something: root is not stopped by them."""
    torch.set_num_threads(1)

    def drop(_: object) -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    assert Child(drop).wait() == 0


def refused(work: Callable[[], object], path: Path) -> StoreError:
    with pytest.raises(StoreError) as caught:
        work()
    assert os.strerror(errno.EACCES) in str(caught.value)
    assert str(path) in str(caught.value), caught.value
    return caught.value


def test_files_without_permission_are_refused_by_name_and_the_rest_is_served(open_folder: Path) -> None:
    root = open_folder / "store"
    without_privileges(lambda: [build_artifact(ArtifactStore(root), TOKENS[:n], LOCAL) for n in (5, 6)])
    store = ArtifactStore(root)
    shut, fine = (store.artifact_id(TOKENS[:n], identity()) for n in (5, 6))
    folder = root / "default" / shut / "gen-00000001"
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(0)

        def look(path: Path = path) -> None:
            error = refused(
                lambda: ArtifactStore(root).open(shut, rank=0), path if path.name != "lease.lock" else folder
            )
            assert isinstance(error, ArtifactError)
            assert error.fault is ArtifactFault.FILE_UNREADABLE
            ArtifactStore(root).open(fine, rank=0).close()

        without_privileges(look)
        path.chmod(mode)
    without_privileges(lambda: ArtifactStore(root).open(shut, rank=0).close())


def test_a_store_that_may_only_be_read_serves_and_refuses_to_build(open_folder: Path) -> None:
    root = open_folder / "store"
    without_privileges(lambda: build_artifact(ArtifactStore(root), TOKENS, LOCAL))
    artifact_id = ArtifactStore(root).ls()[0].published.artifact_id
    places = [root, *(path for path in root.rglob("*"))]
    for path in places:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def use() -> None:
        store = ArtifactStore(root)
        with store.open(artifact_id, rank=0) as lease:
            assert lease.tokens().tolist() == TOKENS
        assert len(store.ls()) == 1
        assert store.verify()[0].sound
        refused(lambda: build_artifact(store, TOKENS[:5], LOCAL), root)
        refused(lambda: store.rm(artifact_id), root)
        refused(lambda: store.pin(artifact_id), root)
        refused(store.gc, root)

    without_privileges(use)
    for path in places:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_folder_without_permission_is_named(open_folder: Path) -> None:
    root = open_folder / "store"
    without_privileges(lambda: build_artifact(ArtifactStore(root), TOKENS, LOCAL))
    artifact_id = ArtifactStore(root).ls()[0].published.artifact_id
    home = root / "default" / artifact_id
    home.chmod(0)

    def use() -> None:
        refused(lambda: ArtifactStore(root).open(artifact_id, rank=0), home)
        refused(lambda: ArtifactStore(root).ls(), home)

    without_privileges(use)
    home.chmod(0o755)


def test_several_may_remove_the_same_folder(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for number in range(6):
        doomed = tmp_path / str(number)
        for name in range(60):
            (doomed / f"{name % 7}").mkdir(parents=True, exist_ok=True)
            (doomed / f"{name % 7}" / f"file-{name}").touch()
        children = [Child(lambda _, doomed=doomed: Files().remove_tree(doomed)) for _ in range(3)]
        assert [child.wait() for child in children] == [0] * 3
        assert not doomed.exists()


class PausingFiles(Files):
    """Stops at the first read of a whole chunk until the test lets it go on."""

    def __init__(self) -> None:
        self.reading, self.go = threading.Event(), threading.Event()

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) > 1 << 20:
            self.reading.set()
            assert self.go.wait(30.0)
        return super().read_into(fd, buffer, offset)


def test_what_is_verified_is_not_removed_under_the_reader(tmp_path: Path) -> None:
    artifact_id = build_artifact(ArtifactStore(tmp_path), TOKENS, LOCAL)
    files = PausingFiles()
    verdicts: list[object] = []
    thread = threading.Thread(target=lambda: verdicts.extend(ArtifactStore(tmp_path, files=files).verify()))
    thread.start()
    assert files.reading.wait(30.0)
    with pytest.raises(StoreError, match="in use"):
        ArtifactStore(tmp_path).rm(artifact_id)
    files.go.set()
    thread.join(30.0)
    assert [verdict.sound for verdict in verdicts] == [True]  # type: ignore[attr-defined]
    ArtifactStore(tmp_path).rm(artifact_id)


def test_what_is_being_removed_has_no_verdict(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    build_artifact(store, TOKENS, LOCAL)
    (found,) = store._folder.all_published()
    with store._folder.try_own(found.path):  # type: ignore[union-attr]
        assert store.verify() == []
    found.path.rename(tmp_path / "elsewhere")
    assert store._verdict(found, True) is None
