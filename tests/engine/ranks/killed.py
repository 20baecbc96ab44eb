"""One rank of a job in which one rank kills itself inside a layer of a prefill. Argument: a folder with task.json."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from tests.engine.ranks.job import make_engine, read_task
from tests.engine.ranks.scenario import make_request
from trt_redknot.engine.walk import LayerWalk


def run(folder: Path) -> None:
    torch.set_num_threads(1)
    world, task = MPI.COMM_WORLD, read_task(folder)
    rank = world.Get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    engine = make_engine(Path(task["checkpoint"]), folder / "engine", world, chunk_rows=16)
    if rank == task["victim"]:
        _kill_in(engine._context.walk, task["layer"], folder, rank)
    engine.generate(make_request(task["question"], []))
    (folder / f"finished-{rank}").touch()


def _kill_in(walk: LayerWalk, fatal: int, folder: Path, rank: int) -> None:
    """The victim dies between the attention of `fatal` and its experts, where the others wait for its sums."""
    attend = walk._attend

    def dying(spec: Any, *arguments: Any) -> torch.Tensor:
        partial = attend(spec, *arguments)
        if spec.layer == fatal:
            (folder / "killed").write_text(f"rank {rank} in layer {fatal}", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        return partial

    walk._attend = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
