"""What killed processes leave in shared memory is removed by the next start, and nothing else is."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.triton import descendants, wait_until_gone
from trt_redknot.launch import mpirun_command, mpirun_environment, run_ranks, session_folder
from trt_redknot.leftovers import SHARED_MEMORY, TRITON_REGIONS, region_prefix, remove_leftovers, remove_regions

HOST = socket.gethostname().partition(".")[0]
OLD_S = 3600


def make(folder: Path, name: str, *, age_s: float = OLD_S) -> Path:
    path = folder / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_only_what_is_ours_old_and_of_the_dead_is_removed(tmp_path: Path) -> None:
    user = os.geteuid()
    dead = [make(tmp_path, f"sm_segment.{HOST}.{user}.54af0001.0"), make(tmp_path, f"{TRITON_REGIONS}.{HOST}.77.abc")]
    kept = [
        make(tmp_path, f"sm_segment.{HOST}.{user}.54af0001.1", age_s=0),
        make(tmp_path, f"sm_segment.{HOST}.{user + 1}.54af0001.0"),
        make(tmp_path, f"sm_segment.elsewhere-{HOST}.{user}.54af0001.0"),
        make(tmp_path, f"{TRITON_REGIONS}.elsewhere-{HOST}.77.abc"),
        make(tmp_path, "triton_python_backend_shm_region_abc"),
        make(tmp_path, "sm_segment"),
    ]
    odd = [f"sm_segment.{HOST}.{user}.aa0001.{number}" for number in range(3)]
    (tmp_path / odd[0]).mkdir()
    (tmp_path / odd[1]).symlink_to(kept[0])
    os.mkfifo(tmp_path / odd[2])
    os.utime(tmp_path / odd[2], (0, 0))
    kept += [tmp_path / name for name in odd]
    assert sorted(remove_leftovers(tmp_path)) == sorted(dead)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert remove_leftovers(tmp_path / "none") == []


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="the system has no /dev/shm")
def test_what_any_process_has_is_kept() -> None:
    """Open as well as mapped: what /proc does not show, as that of another container with this folder, is either."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = Path(name)
        prefix = f"{region_prefix()}x."
        opened, mapped, region = used = [
            make(folder, f"sm_segment.{HOST}.{os.geteuid()}.aa0001.0"),
            make(folder, f"sm_segment.{HOST}.{os.geteuid()}.aa0001.1"),
            make(folder, f"{prefix}abc"),
        ]
        with mapped.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        with memory, opened.open("r+b"), region.open("r+b"):
            for path in used:
                os.utime(path, (time.time() - OLD_S,) * 2)
            assert remove_leftovers(folder) == []
            remove_regions(prefix, folder)
            assert sorted(folder.iterdir()) == sorted(used)
        assert sorted(remove_leftovers(folder)) == sorted(used)


def test_regions_go_with_their_server(tmp_path: Path) -> None:
    mine = make(tmp_path, f"{region_prefix()}abc", age_s=0)
    other = make(tmp_path, f"{TRITON_REGIONS}.{HOST}.{os.getpid()}0.abc", age_s=0)
    remove_regions(region_prefix(), tmp_path)
    assert (mine.exists(), other.exists()) == (False, True)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="the system has no /dev/shm")
def test_a_killed_mpirun_s_segments_go_at_the_next_start(tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.iterdir())
    # By the launcher's own way to MPI; the segments are there as long as the ranks are.
    program = (
        "import sys, time; from trt_redknot.launch import world_communicator as world; world().Barrier(); "
        "print('up', flush=True); time.sleep(600)"
    )
    job = subprocess.Popen(
        mpirun_command(2, ["-c", program]), env=mpirun_environment() | session_folder(tmp_path), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    processes = descendants(job.pid)
    alive = {path for path in set(SHARED_MEMORY.iterdir()) - before if path.name.startswith("sm_segment")}
    assert len(alive) >= 2
    for path in alive:
        os.utime(path, (time.time() - OLD_S,) * 2)
    assert not alive & set(remove_leftovers()), "the segments of living ranks"
    # mpirun first: it would tidy up after its ranks.
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    job.wait(30)
    wait_until_gone(processes, 30)
    job.stdout.close()
    left = {path for path in alive if path.exists()}
    assert left, "mpirun removed them after all: then this module is not needed"
    for path in left:
        os.utime(path, (time.time() - OLD_S,) * 2)
    done = run_ranks(1, ["-c", "from trt_redknot.launch import world_communicator as world; world()"], timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert not [path for path in left if path.exists()]


def test_one_rank_without_a_launcher_touches_no_shared_memory() -> None:
    program = (
        "import sys; from trt_redknot.launch import world_communicator as world; "
        "print(world(), 'mpi4py.MPI' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-m", "mpi4py", "-c", program], env=environment, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout == "None False\n"
