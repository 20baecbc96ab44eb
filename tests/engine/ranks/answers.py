"""What a rank does to check the collectives, build an engine and artifacts, and answer a scenario's questions.

The folder has a task.json; rank 0 writes answers.json there. :mod:`tests.engine.ranks.sizes` starts it.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from mpi4py.MPI import Intracomm

from tests.engine.ranks.collectives import failures
from tests.engine.ranks.job import make_engine, read_task
from tests.engine.ranks.scenario import answer_all, as_json, make_request
from trt_redknot import ArtifactStore
from trt_redknot.collectives.device import DeviceCollectives, make_group
from trt_redknot.collectives.mpi import MpiCollectives
from trt_redknot.digests import digest_json
from trt_redknot.engine import decode_numbers


def run(folder: Path, world: Intracomm) -> None:
    task = read_task(folder)
    ranks = MpiCollectives(world)
    checked = failures(ranks, task["seed"])
    over_group = failures(DeviceCollectives(ranks, make_group(ranks, "gloo")), task["seed"])
    # The next run in this process has other ranks.
    dist.destroy_process_group()
    checkpoint = Path(task["checkpoint"])
    engine = make_engine(checkpoint, folder / "engine", world, chunk_rows=task["chunk_rows"])
    answers = answer_all(engine, ArtifactStore(folder / "store"), task["scenario"])
    # So few rows are on every rank otherwise.
    last = {**task["scenario"], "batches": task["scenario"]["batches"][-1:]}
    with mock.patch.object(decode_numbers, "_REPLICATED_ROWS", 0):
        spread = answer_all(engine, ArtifactStore(folder / "store"), last)
    single = make_engine(checkpoint, folder / "single", world, chunk_rows=task["chunk_rows"], dtype="float32")
    fp32 = as_json(single.generate(make_request(task["fp32"], [])))
    own = {"collectives": [checked, over_group], "digest": digest_json([answers, spread, fp32])}
    everyone = [json.loads(reply) for reply in ranks.exchange(json.dumps(own).encode())]
    if ranks.rank == 0:
        content = {"answers": answers, "spread": spread, "fp32": fp32, "ranks": everyone}
        (folder / "answers.json").write_text(json.dumps(content), encoding="utf-8")
