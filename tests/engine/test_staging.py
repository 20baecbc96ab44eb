"""Folders that killed builds left behind go with the next build; those of builds that run stay."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trt_redknot.artifacts.hosts import Mount
from trt_redknot.engine import staging as staging_module
from trt_redknot.engine.staging import open_staging, remove_stale

HOLD = """
import sys, time
from pathlib import Path
from trt_redknot.engine.staging import open_staging
staging = open_staging(Path(sys.argv[1]))
print(staging.path, flush=True)
time.sleep(600)
"""


def test_a_folder_is_kept_while_its_build_lives_and_goes_when_it_was_killed(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        (path / "rank-0000").mkdir()
        assert remove_stale(output) == []
        assert path.is_dir()
        holder.kill()
        holder.wait(30)
    assert remove_stale(output) == [path]
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_this_output_are_touched(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    (tmp_path / ".engine.building-0").mkdir()
    (tmp_path / ".other.building-0").mkdir()
    (tmp_path / "engine").mkdir()
    (tmp_path / ".engine.building-file").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".engine.building-link").symlink_to(tmp_path / "elsewhere")
    assert remove_stale(output) == [tmp_path / ".engine.building-0"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".other.building-0", "engine", ".engine.building-file", "elsewhere", ".engine.building-link"}


def test_what_is_held_here_is_not_stale_until_it_is_removed(tmp_path: Path) -> None:
    staging = open_staging(tmp_path / "engine")
    assert remove_stale(tmp_path / "engine") == []
    staging.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_build_took_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, taken = staging_module._try_hold, list[Path]()

    def slow(path: Path) -> object:
        if not taken:
            taken.append(path)
            shutil.rmtree(path)
        return hold(path)

    monkeypatch.setattr(staging_module, "_try_hold", slow)
    staging = open_staging(tmp_path / "engine")
    assert staging.path.is_dir()
    assert staging.path not in taken
    staging.remove()


def test_where_locks_reach_one_host_only_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount(point=tmp_path, kind="fuse.sshfs", options=frozenset())
    monkeypatch.setattr(staging_module, "mount_of", lambda path: mount)
    (tmp_path / ".engine.building-0").mkdir()
    assert remove_stale(tmp_path / "engine") == []
    assert (tmp_path / ".engine.building-0").is_dir()


def test_a_file_system_without_locks_still_takes_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, *, exclusive: bool) -> bool:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(staging_module, "try_lock", refuse)
    (tmp_path / ".engine.building-0").mkdir()
    assert remove_stale(tmp_path / "engine") == []
    staging = open_staging(tmp_path / "engine")
    assert staging.lock is None
    staging.remove()
    assert [path.name for path in tmp_path.iterdir()] == [".engine.building-0"]
