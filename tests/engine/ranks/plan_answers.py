"""One rank of a job that answers a scenario's questions by interpreted plans.

Argument: a folder with task.json. Rank 0 writes answers.json there.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import tensorrt_rtx
import torch
from mpi4py import MPI

from tests.engine.ranks.job import make_engine, read_task
from tests.engine.ranks.scenario import answer_all
from tests.support.plan_engine import load_for_plans
from tests.support.plans import cpu_platform
from trt_redknot import ArtifactStore
from trt_redknot.collectives.mpi import MpiCollectives
from trt_redknot.digests import digest_json
from trt_redknot.engine.tensorrt.specification import needs_other_ranks


def run(folder: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("trt_redknot.tensorrt").setLevel(logging.ERROR)
    world, task = MPI.COMM_WORLD, read_task(folder)
    make_engine(Path(task["checkpoint"]), folder / "engine", world, chunk_rows=task["chunk_rows"])
    files = load_for_plans(folder / "engine", world)
    interpreter = files.interpreter(cpu_platform(tensorrt_rtx))
    answers = answer_all(files.engine(interpreter), ArtifactStore(folder / "store"), task["scenario"])
    ranks = MpiCollectives(world)
    meeting = {spec.kind.name for spec in files.specs if needs_other_ranks(spec)}
    runs = digest_json([[name, phase] for name, phase in interpreter.runs if name in meeting])
    everyone = [
        json.loads(reply)
        for reply in ranks.exchange(json.dumps({"digest": digest_json(answers), "runs": runs}).encode())
    ]
    if ranks.rank == 0:
        content = {"answers": answers, "ranks": everyone}
        (folder / "answers.json").write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
