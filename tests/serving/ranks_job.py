"""One rank of a served job. Argument: a folder with task.json. Rank 0 asks and writes answers.json there."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from tests.engine.ranks.job import make_engine, read_task
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import BuildRequest, ServingRequest
from trt_redknot.serving.runner import RankRunner
from trt_redknot.serving.service import Service
from trt_redknot.serving.worker import run_worker


def run(folder: Path) -> None:
    torch.set_num_threads(1)
    world, task = MPI.COMM_WORLD, read_task(folder)
    rank = world.Get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    make_engine(Path(task["checkpoint"]), folder / "engine", world, chunk_rows=16)
    config = ServingConfig(
        engine=folder / "engine", store=folder / "store", world_size=world.Get_size(), cache_tokens=400, max_batch=3
    )
    if rank == task.get("victim"):
        _die_at(task["command"], task["way"], folder)
    if rank == 0:
        _lead(config, task, folder)
    else:
        run_worker(config, world)
    (folder / f"finished-{rank}").touch()


def _lead(config: ServingConfig, task: dict[str, Any], folder: Path) -> None:
    with Service.open(config, MPI.COMM_WORLD) as service:
        built = [
            event.to_json()
            for event in service.submit(BuildRequest(documents=[{"tokens": each} for each in task["documents"]]))  # type: ignore[arg-type]
        ]
        # Idle for a moment: the others sleep, and wake up.
        time.sleep(0.2)
        streams = [service.submit(ServingRequest.parse(request)) for request in task["requests"]]
        for number in task["cancelled"]:
            streams[number].cancel()
        answers = []
        for number, stream in enumerate(streams):
            events = []
            for event in stream:
                events.append(event.to_json())
                if number in task["cancelled_later"]:
                    stream.cancel()
            answers.append(events)
        answers.append([service.submit(ServingRequest.parse(task["requests"][0])).result().to_json()])
        while (health := service.health()).running:
            time.sleep(0.001)
    content = {"built": built, "answers": answers, "health": health.to_json()}
    (folder / "answers.json").write_text(json.dumps(content), encoding="utf-8")


def _die_at(command: str, way: str, folder: Path) -> None:
    """This rank ends when it is told the first command of a kind, as others wait for it."""
    original = RankRunner.run

    def dying(self: RankRunner, told: Any) -> Any:
        if told.op == command:
            (folder / "died").write_text(command, encoding="utf-8")
            if way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("this rank is out of memory")
        return original(self, told)

    RankRunner.run = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
