"""Batches made by other processes: each writes fixed-size arrays to its standard output, nothing is pickled.

Run as a module, it is one such process: ``python -m trt_redknot.evaluation.nano.feed`` with a stage, a seed, the first
step and the stride.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from trt_redknot.errors import LaunchError
from trt_redknot.evaluation.nano.batches import Batch, Stage, make_batch

_PROJECT = Path(__file__).resolve().parents[3]


class Feed:
    """Batches of one stage in order of their steps. With no workers they are made on the spot."""

    def __init__(self, stage: Stage, seed: int, first: int, workers: list[subprocess.Popen[bytes]]) -> None:
        self._stage = stage
        self._seed = seed
        self._first = first
        self._workers = workers

    def batch(self, step: int) -> Batch:
        """The batch of `step`; steps are asked for one after the other.

        Raises:
            LaunchError: the process that makes it has ended.
        """
        if not self._workers:
            return make_batch(self._stage, self._seed, step)
        worker = self._workers[(step - self._first) % len(self._workers)]
        assert worker.stdout is not None
        content = worker.stdout.read(self._stage.batch_bytes)
        if len(content) != self._stage.batch_bytes:
            raise LaunchError("a process that makes training data ended", found=f"exit status {worker.poll()}")
        return Batch.from_bytes(content, self._stage)


@contextmanager
def open_feed(stage: Stage, seed: int, first: int, workers: int) -> Iterator[Feed]:
    """A feed that starts at step `first`; its processes end with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_PROJECT), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "trt_redknot.evaluation.nano.feed", str(stage.length), str(stage.sequences),
                ",".join(stage.kinds), str(stage.questions), str(seed), str(first + worker), str(workers),
            ],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for worker in range(workers)
    ]  # fmt: skip
    try:
        yield Feed(stage, seed, first, processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


@click.command()
@click.argument("length", type=click.IntRange(1))
@click.argument("sequences", type=click.IntRange(1))
@click.argument("kinds")
@click.argument("questions", type=click.IntRange(1))
@click.argument("seed", type=int)
@click.argument("first", type=click.IntRange(0))
@click.argument("stride", type=click.IntRange(1))
def main(length: int, sequences: int, kinds: str, questions: int, seed: int, first: int, stride: int) -> None:
    """Write batches `first`, `first + stride`, ... to standard output until nobody reads them."""
    stage = Stage(length=length, sequences=sequences, kinds=tuple(kinds.split(",")), questions=questions)
    step = first
    while True:
        try:
            sys.stdout.buffer.write(make_batch(stage, seed, step).to_bytes())
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)
        step += stride


if __name__ == "__main__":
    main()
