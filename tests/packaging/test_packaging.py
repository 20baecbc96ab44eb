"""Pins, Makefile, setup.py: what a fresh clone relies on."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path, PurePath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import FOLDER, LONG

ROOT = Path(__file__).resolve().parents[2]
FILES = {name: ROOT / "requirements" / f"{name}.txt" for name in ("runtime", "test", "constraints")}
# Present only where a GPU backend is; the code that imports them says so when they are not there.
OPTIONAL = {"tensorrt", "tensorrt_lean", "triton_python_backend_utils", "cuda", "nvtx"}

# Trains the example network, which transformers defines; nothing else of the package imports it.
TRAINING = ROOT / "trt_redknot" / "evaluation" / "nano"


def pins(name: str) -> dict[str, Requirement]:
    lines = FILES[name].read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_is_an_exact_pin_from_no_named_host(name: str) -> None:
    for requirement in pins(name).values():
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(requirement.specifier)), requirement
    text = FILES[name].read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"^\s*-", text, flags=re.MULTILINE)


def test_the_lock_agrees_with_the_direct_requirements() -> None:
    lock = pins("constraints")
    for name in ("runtime", "test"):
        for key, requirement in pins(name).items():
            assert str(lock[key].specifier) == str(requirement.specifier), key


def test_every_third_party_import_of_the_package_is_a_requirement() -> None:
    distributions = packages_distributions()
    for path in sorted((ROOT / "trt_redknot").rglob("*.py")):
        declared = set(pins("runtime"))
        if path.is_relative_to(TRAINING):
            declared |= set(pins("test"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in {name.split(".")[0] for name in modules} - OPTIONAL - set(sys.stdlib_module_names):
                if module == "trt_redknot":
                    continue
                owners = {canonicalize_name(owner) for owner in distributions.get(module, [])}
                assert owners & declared, f"{path.relative_to(ROOT)} imports {module}, which requirements/ lacks"


def test_every_data_file_of_the_package_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["trt_redknot"]
    package = ROOT / "trt_redknot"
    data = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert data
    for path in data:
        name = str(path.relative_to(package))
        assert any(PurePath(name).match(pattern) for pattern in patterns), name


def test_each_requirement_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    for name in ("runtime", "test"):
        missing = [
            requirement.name for requirement in pins(name).values() if f"`{requirement.name.lower()}`" not in text
        ]
        assert not missing


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_files_that_are_to_come_first_are_there() -> None:
    assert [name for name in LONG if not (FOLDER / name).is_file()] == []


@pytest.mark.parametrize("target", ["demo", "test", "lint", "format", "venv", "plugins", "tools", "lock", "clean"])
def test_makefile_has_the_target_and_each_needs_only_the_environment(target: str) -> None:
    finished = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_an_old_python_is_refused_with_a_remedy(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac\n', encoding="utf-8")
    old.chmod(0o755)
    command = ["make", "venv", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert "is not Python 3.11 or newer" in finished.stderr
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that setup.py reads, without plugins."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    package = folder / "trt_redknot"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    return folder


def build_plugins(checkout: Path, tools: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "build_plugins", *options],
        cwd=checkout,
        env={"PATH": str(tools), "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_tools(folder: Path, *, cmake_status: int = 0) -> Path:
    """An nvcc, and a cmake whose build step writes a library and which writes down its arguments in `calls`."""
    folder.mkdir()
    cmake = f"""#!{sys.executable}
import pathlib, sys
with pathlib.Path(__file__).with_name("calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if "--build" in sys.argv:
    library = pathlib.Path(sys.argv[sys.argv.index("--build") + 1], "lib")
    library.mkdir(parents=True, exist_ok=True)
    (library / "libfake.so").write_bytes(b"library")
sys.exit({cmake_status})
"""
    for name, text in (("nvcc", "#!/bin/sh\n"), ("cmake", cmake)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def with_plugins(checkout: Path) -> None:
    (checkout / "plugins").mkdir()
    (checkout / "plugins" / "CMakeLists.txt").write_text("project(x)\n", encoding="utf-8")


def test_plugins_are_skipped_with_the_reason(checkout: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    skipped = build_plugins(checkout, empty)
    assert (skipped.returncode, "plugins/CMakeLists.txt is not there" in skipped.stdout) == (0, True)
    with_plugins(checkout)
    skipped = build_plugins(checkout, empty)
    assert (skipped.returncode, "nvcc is not on PATH" in skipped.stdout) == (0, True)
    demanded = build_plugins(checkout, empty, TRT_REDKNOT_PLUGINS="on")
    assert (demanded.returncode != 0, "plugins cannot be built" in demanded.stderr) == (True, True)
    unknown = build_plugins(checkout, empty, TRT_REDKNOT_PLUGINS="maybe")
    assert (unknown.returncode != 0, "expected auto, on or off" in unknown.stderr) == (True, True)


def test_plugins_are_built_where_the_tools_are(checkout: Path, tmp_path: Path) -> None:
    with_plugins(checkout)
    tools = fake_tools(tmp_path / "tools")
    off = build_plugins(checkout, tools, TRT_REDKNOT_PLUGINS="off")
    assert (off.returncode, (checkout / "trt_redknot" / "lib").exists()) == (0, False)
    built = build_plugins(checkout, tools)
    assert built.returncode == 0, built.stderr
    assert (checkout / "trt_redknot" / "lib" / "libfake.so").read_bytes() == b"library"
    assert "redknot_kernels" not in (tools / "calls").read_text(encoding="utf-8")


def test_kernels_are_built_before_anything_else_is_installed(checkout: Path, tmp_path: Path) -> None:
    with_plugins(checkout)
    tools = fake_tools(tmp_path / "tools")
    built = build_plugins(checkout, tools, "--kernels-only")
    assert built.returncode == 0, built.stderr
    configure, compile_kernels = (tools / "calls").read_text(encoding="utf-8").splitlines()
    assert "-DREDKNOT_TORCH=OFF" in configure
    assert "-DREDKNOT_TENSORRT=OFF" in configure
    assert compile_kernels.endswith("--target redknot_kernels")
    assert not (checkout / "trt_redknot" / "lib").exists()
    assert build_plugins(checkout, tools).returncode == 0
    configure = (tools / "calls").read_text(encoding="utf-8").splitlines()[2]
    assert "-DREDKNOT_TORCH=ON" in configure
    assert "-DREDKNOT_TENSORRT=ON" in configure


def test_libraries_for_tools_stay_apart_from_those_in_use(checkout: Path, tmp_path: Path) -> None:
    with_plugins(checkout)
    tools = fake_tools(tmp_path / "tools")
    built = build_plugins(checkout, tools, "--for-tools")
    assert built.returncode == 0, built.stderr
    configure, compile_all = (tools / "calls").read_text(encoding="utf-8").splitlines()
    assert "-DREDKNOT_FOR_TOOLS=ON" in configure
    assert "-DREDKNOT_TORCH=ON" in configure
    assert f"--build {checkout / 'build' / 'tools'}" in compile_all
    assert not (checkout / "trt_redknot" / "lib").exists()
    assert build_plugins(checkout, tools).returncode == 0
    assert "-DREDKNOT_FOR_TOOLS=OFF" in (tools / "calls").read_text(encoding="utf-8").splitlines()[2]


def test_a_failed_compilation_is_an_error(checkout: Path, tmp_path: Path) -> None:
    with_plugins(checkout)
    failed = build_plugins(checkout, fake_tools(tmp_path / "tools", cmake_status=1))
    assert failed.returncode != 0
    assert "TRT_REDKNOT_PLUGINS=off" in failed.stderr
