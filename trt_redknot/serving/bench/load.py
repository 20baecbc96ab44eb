"""Asks a target: rounds of both arms, in closed and open loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trt_redknot.errors import LaunchError
from trt_redknot.serving.bench.records import Arm, Level, Loop, Record
from trt_redknot.serving.bench.target import Target
from trt_redknot.serving.bench.workload import Workload
from trt_redknot.serving.messages import DoneEvent, ServingError, TokenEvent


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is asked.

    Attributes:
        levels: one after the other.
        rounds: of both arms at each level. The arm that begins changes from round to round, so that neither always
            meets the warmer machine.
        requests: of an arm in a round.
        warm_up: requests of an arm at each level before its first round.
    """

    levels: tuple[Level, ...]
    rounds: int
    requests: int
    warm_up: int


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One arm of one round: what is sent, and when."""

    arm: Arm
    level: Level
    round: int
    warm_up: bool
    prompts: range

    def arrivals(self, seed: int) -> list[float]:
        """Seconds from the block's begin at which its requests are due. Of both arms of a round they are the same."""
        if self.level.loop is Loop.CLOSED:
            return [0.0] * len(self.prompts)
        draw = np.random.default_rng([seed, self.round, len(self.prompts), int(self.level.value * 1e6)])
        return [float(due) for due in np.cumsum(draw.exponential(1.0 / self.level.value, len(self.prompts)))]


class Load:
    """Runs a plan against a target.

    Args:
        artifact_ids: of the workload's documents, built already.
        tell: gets a line before every level.
    """

    def __init__(
        self, target: Target, workload: Workload, artifact_ids: Sequence[str], *, tell: Callable[[str], None]
    ) -> None:
        self._target = target
        self._workload = workload
        self._artifact_ids = list(artifact_ids)
        self._tell = tell

    def run(self, plan: Plan) -> list[Record]:
        """All records, in the order in which requests ended."""
        records: list[Record] = []
        for level in plan.levels:
            self._tell(f"{level.loop} loop, {level.name}")
            for block in _blocks(plan, level):
                records += self._run_block(block)
        return records

    def _run_block(self, block: _Block) -> list[Record]:
        done: queue.SimpleQueue[Record] = queue.SimpleQueue()
        arrivals = block.arrivals(self._workload.seed)
        begin = time.perf_counter()
        jobs: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        for prompt, arrival in zip(block.prompts, arrivals, strict=True):
            jobs.put((prompt, arrival))

        def ask_on() -> None:
            while True:
                try:
                    prompt, _ = jobs.get_nowait()
                except queue.Empty:
                    return
                done.put(self._ask(block, prompt, time.perf_counter()))

        def ask_once(prompt: int, due_s: float) -> None:
            done.put(self._ask(block, prompt, due_s))

        if block.level.loop is Loop.CLOSED:
            clients = min(int(block.level.value), len(block.prompts))
            threads = [threading.Thread(target=ask_on) for _ in range(clients)]
            for thread in threads:
                thread.start()
        else:
            threads = []
            for prompt, arrival in zip(block.prompts, arrivals, strict=True):
                time.sleep(max(0.0, begin + arrival - time.perf_counter()))
                threads.append(threading.Thread(target=ask_once, args=(prompt, begin + arrival)))
                threads[-1].start()
        for thread in threads:
            thread.join()
        if done.qsize() != len(block.prompts):
            raise LaunchError("a client of the bench failed; its traceback is above", found=done.qsize())
        return [done.get() for _ in block.prompts]

    def _ask(self, block: _Block, prompt: int, due_s: float) -> Record:
        request = self._workload.request(prompt, block.arm, self._artifact_ids)
        sent = time.perf_counter()
        first = last = fault = detail = None
        tokens = 0
        report: dict[str, object] = {}
        try:
            for event in self._target.events(request):
                if isinstance(event, TokenEvent):
                    last = time.perf_counter()
                    first = last if first is None else first
                    tokens += 1
                elif isinstance(event, DoneEvent):
                    report = event.report
        except ServingError as error:
            fault, detail = error.fault.value, str(error)
        except LaunchError as error:
            fault, detail = "no_connection", str(error)
        ran, reason = report.get("arm"), report.get("fallback_reason")
        return Record(
            arm=block.arm,
            level=block.level,
            round=block.round,
            prompt=prompt,
            warm_up=block.warm_up,
            due_s=due_s,
            sent_s=sent,
            first_s=first,
            last_s=last,
            end_s=time.perf_counter(),
            tokens=tokens,
            fault=fault,
            detail=detail,
            arm_run=None if ran is None else str(ran),
            fallback_reason=None if reason is None else str(reason),
        )


def _blocks(plan: Plan, level: Level) -> Iterator[_Block]:
    arms = (Arm.REUSE, Arm.RECOMPUTE)
    if plan.warm_up:
        for arm in arms:
            yield _Block(arm=arm, level=level, round=0, warm_up=True, prompts=range(plan.warm_up))
    for number in range(plan.rounds):
        prompts = range(plan.warm_up + number * plan.requests, plan.warm_up + (number + 1) * plan.requests)
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield _Block(arm=arm, level=level, round=number, warm_up=False, prompts=prompts)
