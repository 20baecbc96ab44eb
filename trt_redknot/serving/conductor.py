"""Turn by turn on rank 0: asks the scheduler, tells all ranks, runs its own part, tells the clients."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

from trt_redknot.artifacts.faults import build_command
from trt_redknot.artifacts.identity import TpGeometry
from trt_redknot.config.documents import parse_json_object
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.producer import Produced
from trt_redknot.engine.response import Response
from trt_redknot.errors import StoreError
from trt_redknot.observability.serving import ServingMetrics
from trt_redknot.serving.commands import Command, Stop, encode_commands
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.jobs import Job, Phase
from trt_redknot.serving.link import Link
from trt_redknot.serving.messages import BuiltEvent, DoneEvent, ServingFault, TokenEvent
from trt_redknot.serving.runner import Advanced, Agreed, Drawn, Failed, Outcome, RankRunner
from trt_redknot.serving.scheduler import Room, Scheduler
from trt_redknot.serving.stores import Stores

_logger = logging.getLogger("trt_redknot.serving")

COMPLETED = "completed"
_NOT_BUILT = "not_built"
# What an operator should look at; everything else is the client's doing.
_WARNED = frozenset({_NOT_BUILT, ServingFault.INTERNAL.value, ServingFault.RANK_FAILED.value})
_MESSAGES = {
    ServingFault.CANCELLED: "the client lost interest",
    ServingFault.DEADLINE: "the request's deadline passed",
    ServingFault.SHUTTING_DOWN: "the service ends",
    ServingFault.TOO_LARGE: "the request does not fit into the service's cache. Shorten it, or serve with more "
    "cache_tokens",
}


def encode_status(verified: list[int]) -> bytes:
    """What a rank says when it is told something: the jobs whose artifacts it has verified since."""
    return json.dumps({"verified": verified}).encode()


@dataclass(kw_only=True)
class Conductor:
    """Not thread-safe: one thread takes all turns, in torch's inference mode.

    Attributes:
        clock: monotonic seconds.
    """

    scheduler: Scheduler
    runner: RankRunner
    link: Link
    stores: Stores
    metrics: ServingMetrics
    clock: Callable[[], float]

    @classmethod
    def over(
        cls, engine: Engine, config: ServingConfig, stores: Stores, link: Link, metrics: ServingMetrics,
        clock: Callable[[], float],
    ) -> Conductor:  # fmt: skip
        """One with everything it needs. To be made by the thread that takes the turns."""
        runner = RankRunner(engine, config, stores)
        pool = runner.generation.pool
        room = Room(capacity=pool.capacity, fits=pool.has_room, size_of_document=runner.size_of_document)
        scheduler = Scheduler(config=config, room=room, other_ranks=link.size - 1)
        return cls(scheduler=scheduler, runner=runner, link=link, stores=stores, metrics=metrics, clock=clock)

    def turn(self) -> bool:
        """Do what is due. False where nothing was, and nothing is before a job comes or artifacts are verified."""
        scheduler = self.scheduler
        commands = self._drop(scheduler.ended(self.clock()))
        scheduler.verified(self.runner.preloader.finished(), self.clock())
        planned = scheduler.plan(self.clock())
        if not commands and not planned and not (scheduler.awaits_files and self.link.size > 1):
            return False
        self._tell([*commands, *planned])
        for command in [*commands, *planned]:
            self._settle(command, self.runner.run(command))
        self._count()
        return bool(commands or planned)

    def stop(self, fault: ServingFault = ServingFault.SHUTTING_DOWN) -> None:
        """Fail everything that is open, and end the loops of all ranks."""
        commands = self._drop([(job, fault) for job in self.scheduler.jobs.values()])
        commands.append(Stop())
        self._tell(commands)
        for command in commands:
            self.runner.run(command)
        self._count()

    def _tell(self, commands: list[Command]) -> None:
        if self.link.size == 1:
            return
        for status in self.link.lead(encode_commands(commands)):
            self.scheduler.verified(parse_json_object(status)["verified"], self.clock())

    def _drop(self, ended: list[tuple[Job, ServingFault]]) -> list[Command]:
        commands: list[Command] = []
        for job, fault in ended:
            commands += self.scheduler.drop(job)
            self._fail(job, fault, job.message or _MESSAGES[fault])
        return commands

    def _fail(self, job: Job, fault: ServingFault, message: str) -> None:
        """Tell a job's client, the counters and the log that it failed. Nothing is freed."""
        job.times.ended = self.clock()
        self.metrics.ended(fault.value, job.kind)
        self._log(job, fault.value, message, {})
        job.fail(fault, message)

    def _settle(self, command: Command, outcome: Outcome) -> None:
        """Take in what a command did."""
        if isinstance(outcome, dict):
            for number, drawn in outcome.items():
                self._token(self.scheduler.jobs[number], drawn)
            return
        job = self.scheduler.jobs.get(getattr(command, "job", -1))
        if job is None:
            return
        match outcome:
            case Agreed():
                job.fault = self.scheduler.admitted(job, outcome.size, outcome.tokens, outcome.reason)
                if job.fault is ServingFault.MISSING_DOCUMENT:
                    job.message = self._missing(job, outcome.refused)
            case Failed(busy=True) if job.phase is Phase.BUILDING and self.scheduler.busy(job, self.clock()):
                pass
            case Failed() if job.phase is Phase.BUILDING and job.request is not None:
                # The document can still be recomputed, and the answer says so.
                self._log(job, _NOT_BUILT, outcome.message, {})
                self.scheduler.built(job, self.clock())
            case Failed():
                # Dropped in the next turn: the other ranks hold what the job held, too.
                job.fault, job.message = outcome.fault, outcome.message
            case Advanced(done=True, produced=None):
                job.times.first_token = self.clock()
                drawn = self.runner.first(job.number)
                self.scheduler.prefilled(job)
                self._token(job, drawn)
            case Advanced(done=True, produced=Produced() as produced):
                self._built(job, produced)
            case Response():
                self._answer(job, outcome)

    def _token(self, job: Job, drawn: Drawn) -> None:
        job.times.last_token = self.clock()
        job.tokens.append(drawn.token)
        text = job.text.push(drawn.token)
        job.stream.put(TokenEvent(index=len(job.tokens) - 1, token=drawn.token, text=text))
        self.metrics.generated(1)
        if drawn.done or job.text.stopped:
            self.scheduler.ending(job)

    def _built(self, job: Job, produced: Produced) -> None:
        now = self.clock()
        event = BuiltEvent(
            index=len(job.built), artifact_id=produced.artifact_id, tokens=len(job.documents[0]), built=produced.built,
            bytes=self._size(job.tenant, produced.artifact_id), seconds=now - job.build_started,
        )  # fmt: skip
        job.built.append(event)
        self.metrics.document(built=produced.built)
        if job.request is None:
            job.stream.put(event)
        if not self.scheduler.built(job, now):
            documents = [each.to_json() for each in job.built]
            self.scheduler.finished(job)
            report = self._report(job, {"documents": documents})
            self._done(job, DoneEvent(tokens=(), text=None, tail="", finish_reason="built", report=report))

    def _missing(self, job: Job, refused: int | None) -> str:
        """Which document a request refuses to go on without, and how it gets there."""
        assert refused is not None
        artifact_id, store = job.artifact_ids[refused], self.stores[job.tenant]
        command = build_command(store.root, store.namespace, self.scheduler.config.engine)
        return (
            f"document {refused} of the request, counted from 0, is not in the store, expected artifact {artifact_id}, "
            f"in {store.root / store.namespace}, and the request says to refuse then. Build it: {command}, or send it "
            'with "missing": "build" or "recompute"'
        )

    def _size(self, tenant: str, artifact_id: str) -> int:
        """Bytes of an artifact's files; 0 where it is gone again or cannot be looked at."""
        engine = self.runner.engine
        tp = TpGeometry.even(engine.geometry, self.link.size)
        try:
            certificate = self.stores[tenant].find(artifact_id, identity=engine.identity, tp=tp)
        except StoreError:
            return 0
        return 0 if certificate is None else sum(file.size for file in certificate.files)

    def _answer(self, job: Job, response: Response) -> None:
        self.scheduler.finished(job)
        tail = job.text.finish()
        report, times = response.report, job.times
        assert times.first_token is not None
        ttft_s, tpot_s = times.first_token - times.submitted, times.tpot_s(len(job.tokens))
        self.metrics.answered(report, ttft_s=ttft_s, tpot_s=tpot_s)
        stopped = job.text.stopped or response.finish_reason == "stop"
        self._done(
            job,
            DoneEvent(
                tokens=tuple(response.tokens), text=job.text.text, tail=tail,
                finish_reason="stop" if stopped else "length", report=self._report(job, report.to_json()),
            ),
        )  # fmt: skip

    def _done(self, job: Job, event: DoneEvent) -> None:
        # Counted before the client can know: whoever has the answer finds it counted.
        self.metrics.ended(COMPLETED, job.kind)
        self._log(job, COMPLETED, event.finish_reason, event.report)
        job.stream.put(event)

    def _report(self, job: Job, report: dict[str, object]) -> dict[str, object]:
        job.times.ended = self.clock()
        serving = {"tenant": job.tenant, **job.times.to_json(len(job.tokens))}
        return {**report, "request_id": job.request_id, "serving": serving}

    def _count(self) -> None:
        free = self.runner.generation.pool.free.latents
        self.metrics.load(waiting=self.scheduler.queued, running=self.scheduler.holding, free_rows=free)

    def _log(self, job: Job, outcome: str, message: str, report: dict[str, object]) -> None:
        _logger.log(
            logging.WARNING if outcome in _WARNED else logging.INFO,
            "request %r: %s: %s", job.request_id, outcome, message,
            extra={
                "event": "request", "request_id": job.request_id, "tenant": job.tenant, "outcome": outcome,
                "kind": job.kind, "arm": report.get("arm"), "fallback_reason": report.get("fallback_reason"),
                "tokens": len(job.tokens), **job.times.to_json(len(job.tokens)),
            },
        )  # fmt: skip
