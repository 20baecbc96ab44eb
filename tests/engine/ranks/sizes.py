"""One rank of a job that runs several scripts of this folder one after another, each on its first ranks.

Ranks take seconds to start, of which most go into imports: this way they start once. Argument: a folder with task.json,
whose `runs` are a script, a number of ranks, and the folder with the script's own task.json.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

from tests.engine.ranks import answers, fallback
from tests.engine.ranks.job import read_task

SCRIPTS = {"answers": answers.run, "fallback": fallback.run}
POLL_S = 0.01


def run(folder: Path) -> None:
    torch.set_num_threads(1)
    world, task = MPI.COMM_WORLD, read_task(folder)
    for script, ranks, place in task["runs"]:
        own = world.Split(0 if world.Get_rank() < ranks else MPI.UNDEFINED, world.Get_rank())
        if own != MPI.COMM_NULL:
            # A rank that hangs says where, and takes the job with it.
            faulthandler.dump_traceback_later(task["timeout_s"], exit=True)
            SCRIPTS[script](Path(place), own)
            faulthandler.cancel_dump_traceback_later()
            own.Free()
        _wait_for_all(world)


def _wait_for_all(world: MPI.Intracomm) -> None:
    """A barrier that leaves the cores to those who still work."""
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(POLL_S)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
