"""One rank of a job whose build is killed. Arguments: checkpoint, output, rank to kill, layers written before that."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import from_communicator
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BuildOptions, build_torch_engine
from trt_redknot.launch import world_communicator


def run(checkpoint: Path, output: Path, victim: int, fatal: int) -> None:
    torch.set_num_threads(1)
    collectives = from_communicator(world_communicator())
    geometry = load_geometry(checkpoint)

    def progress(done: int) -> None:
        if collectives.rank == victim and done == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    build_torch_engine(
        Checkpoint.open(checkpoint, geometry), SplitProfile.default(geometry), output, BuildOptions(), collectives,
        progress=progress,
    )  # fmt: skip


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
