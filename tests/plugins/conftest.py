"""The built plugin libraries and the host program, built from the sources as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from trt_redknot.ops.cuda.library import library_folder

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "plugins"
# The first build compiles every kernel, on two cores beside other tests.
BUILD_SECONDS = 1500


@dataclass(frozen=True, kw_only=True)
class Built:
    """Paths of what was built."""

    plugins: Path
    host: Path

    def run(self, mode: str, *manifests: Path) -> subprocess.CompletedProcess[str]:
        """The host program on some manifests; output captured, no check of the status."""
        command = [str(self.host), str(self.plugins), mode, *map(str, manifests)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def build() -> str | None:
    """Bring build/plugins up to date; why that cannot be done here, or None."""
    if os.environ.get("TRT_REDKNOT_PLUGINS") == "off":
        return "TRT_REDKNOT_PLUGINS=off"
    for tool in ("nvcc", "cmake"):
        if shutil.which(tool) is None:
            return f"{tool} is not on PATH"
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD / "tests.lock", timeout=BUILD_SECONDS):
        command = [sys.executable, "setup.py", "build_plugins"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return None


@pytest.fixture(scope="session")
def built() -> Built:
    reason = build()
    found = Built(plugins=library_folder() / "libredknot_tensorrt.so", host=BUILD / "tests" / "contract_host")
    if not (found.plugins.is_file() and found.host.is_file()):
        pytest.skip(f"the TensorRT plugins were not built: {reason or 'TensorRT headers were not found'}")
    return found
