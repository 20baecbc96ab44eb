"""Packaging. Everything static is in pyproject.toml; this file adds the one dynamic part, the plugin libraries.

`plugins/` is built with CMake where nvcc, cmake and plugins/CMakeLists.txt are present, and is skipped with the reason
printed where they are not: the CPU default needs none of them. TRT_REDKNOT_PLUGINS=off skips it everywhere,
TRT_REDKNOT_PLUGINS=on makes a missing tool an error. An editable install never builds: `make plugins` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build import build
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent


def missing_tool() -> str | None:
    """Why the plugins cannot be built here, or None when they can."""
    if not (ROOT / "plugins" / "CMakeLists.txt").is_file():
        return "plugins/CMakeLists.txt is not there"
    for tool in ("nvcc", "cmake"):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH"
    return None


class BuildPlugins(Command):
    """`python setup.py build_plugins`: compile plugins/ into build/plugins and put the libraries beside the package."""

    description = "build the CUDA and TensorRT plugin libraries (needs nvcc and cmake)"
    user_options = [  # noqa: RUF012 (the attribute of setuptools.Command)
        ("cmake-args=", None, "more arguments for cmake, for example -DTENSORRT_ROOT=/opt/tensorrt"),
        ("jobs=", "j", "parallel compile jobs"),
        ("kernels-only", None, "compile the kernels, which need neither torch nor TensorRT, and put nothing anywhere"),
        ("for-tools", None, "compile for tools that instrument every access, into build/tools/lib"),
    ]
    boolean_options = ["kernels-only", "for-tools"]  # noqa: RUF012 (the attribute of setuptools.Command)

    def initialize_options(self) -> None:
        self.cmake_args = ""
        self.kernels_only = False
        self.for_tools = False
        self.jobs: str | None = None
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        setting = os.environ.get("TRT_REDKNOT_PLUGINS", "auto")
        if setting not in ("auto", "on", "off"):
            raise SetupError(f"TRT_REDKNOT_PLUGINS: expected auto, on or off, found {setting}")
        if self.editable_mode:
            print("plugins: skipped, an editable install does not build them (make plugins does)")
            return
        if setting == "off":
            print("plugins: skipped, TRT_REDKNOT_PLUGINS=off")
            return
        reason = missing_tool()
        if reason is None:
            # Named on the command line, the libraries go beside the sources; inside a build, into the wheel.
            named = "build_plugins" in self.distribution.commands
            self._compile(ROOT if named else Path(self.build_lib or ROOT))
        elif setting == "on":
            raise SetupError(f"plugins cannot be built: {reason}")
        else:
            print(f"plugins: skipped, {reason}")

    def get_source_files(self) -> list[str]:
        folder = ROOT / "plugins"
        return [str(path.relative_to(ROOT)) for path in sorted(folder.rglob("*")) if path.is_file()]

    def get_outputs(self) -> list[str]:
        library = Path(self.build_lib or ".") / "trt_redknot" / "lib"
        return [str(path) for path in sorted(library.glob("*.so"))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _compile(self, target: Path) -> None:
        work = ROOT / "build" / ("tools" if self.for_tools else "plugins")
        libraries = work / "lib"
        jobs = self.jobs or str(os.cpu_count() or 1)
        adapters = "OFF" if self.kernels_only else "ON"
        configure = [
            "cmake",
            "-S",
            str(ROOT / "plugins"),
            "-B",
            str(work),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={libraries}",
            f"-DREDKNOT_PYTHON={sys.executable}",
            f"-DREDKNOT_TORCH={adapters}",
            f"-DREDKNOT_TENSORRT={'OFF' if self.for_tools else adapters}",
            f"-DREDKNOT_FOR_TOOLS={'ON' if self.for_tools else 'OFF'}",
            *self.cmake_args.split(),
        ]
        build = ["cmake", "--build", str(work), "--parallel", jobs]
        if self.kernels_only:
            build += ["--target", "redknot_kernels"]
        for command in (configure, build):
            self.announce(" ".join(command), level=2)
            if subprocess.run(command, check=False).returncode:
                raise ExecError(
                    f"{' '.join(command)} failed, see its output above. "
                    "To install without the plugins: TRT_REDKNOT_PLUGINS=off pip install ."
                )
        if self.kernels_only or self.for_tools:
            return
        destination = target / "trt_redknot" / "lib"
        destination.mkdir(parents=True, exist_ok=True)
        for library in sorted(libraries.glob("*.so")):
            # By rename: a process that has the old library mapped keeps it whole.
            partial = Path(shutil.copy2(library, Path(destination) / f".{library.name}.{os.getpid()}"))
            print(f"plugins: {partial.replace(Path(destination) / library.name)}")


class Build(build):
    """The standard build, with the plugins after the Python files."""

    sub_commands = [*build.sub_commands, ("build_plugins", None)]  # noqa: RUF012 (the attribute of setuptools)


setup(cmdclass={"build": Build, "build_plugins": BuildPlugins})
