"""One rank of a job that builds an engine of plans on a CPU.

Arguments: checkpoint, output, folder, how rank 1 fails ("nothing" or "killed"). Every rank that
ends by itself writes its outcome to folder/outcome-RANK.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import tensorrt_rtx
import torch

from tests.support.plans import cpu_platform
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import from_communicator
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.build import BuildOptions
from trt_redknot.engine.tensorrt.build import PlanOptions, build_tensorrt_engine
from trt_redknot.engine.tensorrt.builder import BuilderSettings
from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.specification import PlanFormat
from trt_redknot.errors import EngineError
from trt_redknot.launch import world_communicator


def run(checkpoint: Path, output: Path, folder: Path, failing: str) -> int:
    torch.set_num_threads(1)
    logging.getLogger("trt_redknot.tensorrt").setLevel(logging.CRITICAL)
    collectives = from_communicator(world_communicator())
    fails = collectives.rank == 1
    geometry = load_geometry(checkpoint)
    platform = cpu_platform(tensorrt_rtx)

    def progress(steps: int) -> None:
        if fails and failing == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    plans = PlanOptions(
        limits=PlanLimits(chunk_rows=256, max_length=2048),
        format=PlanFormat(),
        settings=BuilderSettings(optimization_level=0),
    )
    options = BuildOptions(
        dtype="bfloat16", artifact_format=ArtifactFormat.BFLOAT16, max_length=2048, chunk_rows=256
    )  # fmt: skip
    outcome, status = "built", 0
    try:
        build_tensorrt_engine(
            Checkpoint.open(checkpoint, geometry), SplitProfile.default(geometry), output, options, plans, collectives,
            lambda: platform, progress=progress,
        )  # fmt: skip
    except EngineError as error:
        outcome, status = str(error), error.exit_code
    (folder / f"outcome-{collectives.rank}").write_text(outcome)
    return status


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
