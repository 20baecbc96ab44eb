"""Where a Triton server is on this machine, and what it needs to run Python models in this environment."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from trt_redknot.errors import LaunchError

_SYSTEM = Path("/opt/tritonserver")
_REMEDY = "Install one: make venv (a CPU server, for Python 3.11 and 3.12), or NVIDIA's container; or put it on PATH."


@dataclass(frozen=True, kw_only=True)
class TritonInstall:
    """A Triton server.

    Attributes:
        server: the program.
        backends: its folder of backends, which must have the Python backend.
        path: folders that come first on PATH: the stub takes the Python environment of the first `python3` there.
        libraries: folders the server's libraries are in.
    """

    server: Path
    backends: Path
    path: tuple[Path, ...] = ()
    libraries: tuple[Path, ...] = field(default=())

    @property
    def interpreter(self) -> Path:
        """What the stub's Python environment calls itself: for ranks that must have the same one."""
        return self.path[0] / "python3" if self.path else Path(sys.executable)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with what the server and its Python models need."""
        values = dict(base)
        values["PATH"] = _joined(*self.path, Path(sys.prefix) / "bin", values.get("PATH", os.defpath))
        if self.libraries:
            values["LD_LIBRARY_PATH"] = _joined(*self.libraries, values.get("LD_LIBRARY_PATH", ""))
        # An interpreter with a prefix of its own does not find the MPI library that lies in this one.
        libmpi = Path(sys.prefix) / "lib"
        if (libmpi / "libmpi.so.40").is_file():
            values.setdefault("MPI4PY_LIBMPI", str(libmpi))
        return values


def find_triton(server: Path | None = None, backends: Path | None = None) -> TritonInstall:
    """The server named, else that of this environment, else that on PATH, else that in /opt/tritonserver.

    Raises:
        LaunchError: none is there, or it lacks the Python backend.
    """
    if server is None:
        wheel = _wheel()
        if wheel is not None and backends is None:
            return wheel
        found = shutil.which("tritonserver")
        server = Path(found) if found else _SYSTEM / "bin" / "tritonserver"
    if not os.access(server, os.X_OK) or server.is_dir():
        raise LaunchError("no Triton server was found", expected="an executable", path=server, remedy=_REMEDY)
    folder = backends or server.resolve().parents[1] / "backends"
    if not (folder / "python" / "libtriton_python.so").is_file():
        raise LaunchError(
            "the Triton server has no Python backend", expected="python/libtriton_python.so", path=folder,
            remedy="Name the folder of backends: --backends.",
        )  # fmt: skip
    return TritonInstall(server=server, backends=folder)


def _wheel() -> TritonInstall | None:
    """The server of requirements/triton.txt, as requirements/arrange_triton.py laid it out; None where it is not."""
    spec = find_spec("pytriton")
    arranged = Path(sys.prefix) / "triton"
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    server = package / "tritonserver" / "bin" / "tritonserver"
    stub = arranged / "backends" / "python" / "triton_python_backend_stub"
    if not server.is_file() or not stub.is_file():
        return None
    return TritonInstall(
        server=server,
        backends=arranged / "backends",
        path=(arranged / "python" / "bin",),
        libraries=(package.parent / "nvidia_pytriton.libs", *_libpython()),
    )


def _libpython() -> tuple[Path, ...]:
    """The folder of this interpreter's own library: the stub must not meet that of another Python of this version."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if folder and name and (Path(folder) / name).is_file():
        return (Path(folder),)
    return ()


def _joined(*entries: Path | str) -> str:
    return os.pathsep.join(str(entry) for entry in entries if str(entry))
