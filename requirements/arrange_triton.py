"""Lays out the Triton server of requirements/triton.txt in the environment that runs this, under `triton/`.

    triton/backends/python/   the Python backend with the stub of this Python version, as --backend-directory wants it
    triton/python/            an interpreter for the stub: numpy of requirements/triton_python.txt, the rest from here

The wheel keeps backend and stubs apart. The stub ignores PYTHONPATH and takes the environment of the first `python3` on
PATH, so an environment of its own is the way to give it another numpy.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

NUMPY = Path(__file__).resolve().with_name("triton_python.txt")
CANNOT_LOAD = 127
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def main() -> None:
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        sys.exit("nvidia-pytriton is not installed")
    wheel = Path(found.submodule_search_locations[0]) / "tritonserver"
    stub = wheel / "python_backend_stubs" / VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        sys.exit(f"the wheel has no Python backend for Python {VERSION}")
    target = Path(sys.prefix) / "triton"
    shutil.rmtree(target, ignore_errors=True)
    # Without a libpython the loader refuses the stub, with this status.
    libraries = sysconfig.get_config_var("LIBDIR") or ""
    started = subprocess.run(
        [stub], env={"LD_LIBRARY_PATH": f"{wheel.parents[1] / 'nvidia_pytriton.libs'}:{libraries}"}, capture_output=True
    )
    if started.returncode == CANNOT_LOAD:
        sys.exit(f"the Python backend cannot be loaded: {started.stderr.decode(errors='replace').strip()}")
    backend = target / "backends" / "python"
    shutil.copytree(wheel / "backends" / "python", backend)
    shutil.copy2(stub, backend)
    interpreter = target / "python"
    venv.create(interpreter, with_pip=False, symlinks=True)
    packages = interpreter / "lib" / f"python{VERSION}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(packages), "--requirement", str(NUMPY)], check=True)
    everything_else = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "environment.pth").write_text(everything_else, encoding="utf-8")


if __name__ == "__main__":
    main()
