"""What the scripts of this folder have in common: an engine that all ranks of the job build and open."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_redknot import Engine
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import from_communicator
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BuildOptions, build_torch_engine
from trt_redknot.launch import run_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

ROOT = Path(__file__).parents[3]
TASK = "task.json"


def make_engine(
    checkpoint: Path,
    output: Path,
    comm: Intracomm | None,
    *,
    chunk_rows: int,
    dtype: str = "float64",
    profile: SplitProfile | None = None,
) -> Engine:
    """Build and open. Collective over `comm`; None: one rank."""
    geometry = load_geometry(checkpoint)
    options = BuildOptions(dtype=dtype, artifact_format=ArtifactFormat(dtype), chunk_rows=chunk_rows)  # type: ignore[arg-type]
    build_torch_engine(
        Checkpoint.open(checkpoint, geometry),
        profile or SplitProfile.default(geometry),
        output,
        options,
        from_communicator(comm),
    )
    return Engine.open(output, comm)


def start(ranks: int, script: str, folder: Path, task: dict[str, Any], *, timeout_s: float) -> Any:
    """Run `tests.engine.ranks.<script>` on `ranks` ranks with a task that it finds in `folder`."""
    (folder / TASK).write_text(json.dumps(task), encoding="utf-8")
    finished: subprocess.CompletedProcess[str] = run_ranks(
        ranks,
        ["-m", f"tests.engine.ranks.{script}", str(folder)],
        timeout_s=timeout_s,
        environment=rank_environment(),
    )
    return finished


def read_task(folder: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads((folder / TASK).read_text(encoding="utf-8"))
    return task


def rank_environment() -> dict[str, str]:
    """This process's, with one thread a rank and this repository to import from."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
