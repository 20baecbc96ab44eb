"""What runs next. Pure bookkeeping on rank 0: no engine, no thread, no clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.engine.pool import PoolRows
from trt_redknot.serving.commands import Admit, Advance, Begin, Build, Command, Decode, Drop, Finish, Preload
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.fairness import FairQueue
from trt_redknot.serving.jobs import HOLDING, QUEUED, Job, Phase
from trt_redknot.serving.messages import ServingFault

# Seconds after which a build that another process was at is tried again, and for how long.
_AGAIN_S = 0.5
_BUSY_S = 600.0
# The one that runs and the next one.
_STAGED_BUILDS = 2


@dataclass(kw_only=True)
class Room:
    """What the scheduler asks of the cache pool.

    Attributes:
        capacity: all its rows.
        fits: whether a sequence of this size can be opened now.
        size_of_document: rows that building a document of so many tokens takes.
    """

    capacity: PoolRows
    fits: Callable[[PoolRows], bool]
    size_of_document: Callable[[int], PoolRows]


@dataclass(kw_only=True)
class Scheduler:
    """Decides command by command; the caller runs them in order and says what came of them.

    A turn holds, in this order: jobs that are over, artifacts to verify for coming requests, one request or document
    that begins, a few steps of prompts and documents by turns, and one token for every sequence that has its first.

    Attributes:
        size: of a request that was admitted.
        other_ranks: ranks whose word it takes besides our own that artifacts were verified.
    """

    config: ServingConfig
    room: Room
    other_ranks: int
    waiting: FairQueue[Job] = field(default_factory=FairQueue)
    jobs: dict[int, Job] = field(default_factory=dict)
    _staged: list[Job] = field(default_factory=list)
    _prepared: list[Command] = field(default_factory=list)
    _turns: list[Job] = field(default_factory=list)
    _sizes: dict[int, PoolRows] = field(default_factory=dict)
    _verified: dict[int, int] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        """Take a job that was submitted."""
        self.jobs[job.number] = job
        self.waiting.put(job.tenant, job)

    def count(self, phases: Iterable[Phase]) -> int:
        wanted = frozenset(phases)
        return sum(job.phase in wanted for job in self.jobs.values())

    @property
    def awaits_files(self) -> bool:
        """Whether anything may happen without a command: artifacts that are being verified."""
        return any(job.phase is Phase.LOADING for job in self._staged)

    def ended(self, now: float) -> list[tuple[Job, ServingFault]]:
        """Jobs that are to be dropped now, and why: they failed, nobody wants them, or their time is over."""
        found = []
        for job in self.jobs.values():
            if job.fault is not None:
                found.append((job, job.fault))
            elif job.cancelled:
                found.append((job, ServingFault.CANCELLED))
            elif job.deadline is not None and now >= job.deadline:
                found.append((job, ServingFault.DEADLINE))
        return found

    def drop(self, job: Job) -> list[Command]:
        """Forget a job, whatever it is doing; the commands that free what it holds."""
        waits = job.phase is Phase.WAITING
        if waits:
            self.waiting.remove(job.tenant, job)
        self._forget(job)
        return [] if waits else [Drop(job=job.number)]

    def _forget(self, job: Job) -> None:
        job.phase = Phase.OVER
        self.jobs.pop(job.number, None)
        self._sizes.pop(job.number, None)
        self._verified.pop(job.number, None)
        self._staged = [each for each in self._staged if each is not job]
        self._prepared = [each for each in self._prepared if getattr(each, "job", None) != job.number]
        self._turns = [each for each in self._turns if each is not job]

    def plan(self, now: float) -> list[Command]:
        """The commands of a turn. They must all be run, and `settle` be told of each, before the next turn."""
        self._stage(now)
        prepared, self._prepared = self._prepared, []
        commands = [*self._finish(), *prepared, *self._start(now), *self._advance()]
        decoding = tuple(job.number for job in self.jobs.values() if job.phase is Phase.DECODING)
        return [*commands, Decode(jobs=decoding)] if decoding else commands

    def _finish(self) -> list[Command]:
        return [Finish(job=job.number) for job in self.jobs.values() if job.phase is Phase.ENDING]

    def _stage(self, now: float) -> None:
        """Take requests out of the queue, tenants by turns, as many as are looked ahead."""
        while (job := self.waiting.take(self._may_stage)) is not None:
            self.waiting.charge(job.tenant, job.cost)
            job.times.staged = now
            self._staged.append(job)
            self._prepare(job, now)

    def _may_stage(self, job: Job) -> bool:
        """Builds and requests do not take each other's places: a build is long, and there is one at a time."""
        builds = sum(bool(each.documents) for each in self._staged)
        return builds < _STAGED_BUILDS if job.documents else len(self._staged) - builds < self.config.lookahead

    def _prepare(self, job: Job, now: float) -> None:
        """The next thing a staged job needs before its turn."""
        job.times.loading = now
        if job.documents:
            job.phase = Phase.TO_BUILD
        elif job.artifact_ids:
            job.phase = Phase.LOADING
            self._verified[job.number] = 0
            self._prepared.append(Preload(job=job.number, tenant=job.tenant, artifact_ids=job.artifact_ids))
        else:
            job.phase = Phase.READY

    def verified(self, numbers: Sequence[int], now: float) -> None:
        """One rank has verified the artifacts of these jobs."""
        for number in numbers:
            job = self.jobs.get(number)
            if job is None or job.phase is not Phase.LOADING:
                continue
            self._verified[number] += 1
            if self._verified[number] > self.other_ranks:
                job.phase = Phase.READY
                job.times.verified = now

    def _start(self, now: float) -> list[Command]:
        """Let one staged job begin something. The first that could, but for room, is not overtaken."""
        if len(self._turns) >= self.config.max_prefills:
            return []
        building = any(job.phase is Phase.BUILDING for job in self._turns)
        admitted = next((job for job in self.jobs.values() if job.phase is Phase.ADMITTED), None)
        if admitted is not None:
            return self._begin(admitted, now) if self.room.fits(self._sizes[admitted.number]) else []
        if self.count(HOLDING) >= self.config.max_batch:
            return []
        for job in self._staged:
            left_s = self._left_s(job, now)
            if job.phase is Phase.READY or (job.phase is Phase.LOADING and left_s == 0.0):
                return self._admit(job, now, left_s)
            # One at a time: two builds of the same document would wait for each other.
            if job.phase is Phase.TO_BUILD and not building and now >= job.not_before:
                return self._build(job, now) if self.room.fits(self._document_size(job)) else []
        return []

    def _document_size(self, job: Job) -> PoolRows:
        return self.room.size_of_document(len(job.documents[0]))

    def _left_s(self, job: Job, now: float) -> float:
        """Seconds left of those that the ranks may spend on a request's artifacts."""
        if job.request is None or job.request.reuse is None or job.times.loading is None:
            return 0.0
        # No request keeps its staged place for as long as it likes.
        allowed_s = min(job.request.reuse.deadline_s, self.config.stall_s)
        # Verified artifacts wait for their request's turn as long as it takes.
        spent_s = (now if job.phase is Phase.LOADING else job.times.verified or now) - job.times.loading
        return max(0.0, allowed_s - spent_s)

    def _admit(self, job: Job, now: float, left_s: float) -> list[Command]:
        assert job.request is not None
        job.phase = Phase.ADMITTED
        job.times.admitted = now
        return [Admit(job=job.number, tenant=job.tenant, request=job.request, left_s=left_s)]

    def _begin(self, job: Job, now: float) -> list[Command]:
        job.phase = Phase.PREFILLING
        job.times.prefilling = now
        self._turns.append(job)
        return [Begin(job=job.number)]

    def _build(self, job: Job, now: float) -> list[Command]:
        job.phase = Phase.BUILDING
        job.build_started = now
        if job.times.building is None:
            job.times.building = now
        # At the head, so that its first step is taken in this turn: with it comes its place in the pool.
        self._turns.insert(0, job)
        return [Build(job=job.number, tenant=job.tenant, tokens=job.documents[0], rebuild=job.rebuild)]

    def _advance(self) -> list[Command]:
        """Share the steps of a turn among those whose prompts run, first come first."""
        steps: dict[int, int] = {}
        for turn in range(self.config.prefill_steps if self._turns else 0):
            number = self._turns[turn % len(self._turns)].number
            steps[number] = steps.get(number, 0) + 1
        # Whoever was first goes to the end: with fewer steps than jobs all get their turns.
        taken = len(steps)
        self._turns = self._turns[taken:] + self._turns[:taken]
        return [Advance(job=number, steps=count) for number, count in steps.items()]

    def admitted(self, job: Job, size: PoolRows, tokens: int, reason: FallbackReason | None) -> ServingFault | None:
        """A request was admitted, for reuse or not. Why it cannot go on all the same, None where it can."""
        assert job.request is not None
        self._staged.remove(job)
        self._sizes[job.number] = size
        cost = tokens + job.request.max_new_tokens
        self.waiting.charge(job.tenant, cost - job.cost)
        job.cost = cost
        if job.missing == "refuse" and reason is FallbackReason.MISSING_ARTIFACT:
            return ServingFault.MISSING_DOCUMENT
        return None if size.within(self.room.capacity) else ServingFault.TOO_LARGE

    def prefilled(self, job: Job) -> None:
        """A job has its first token."""
        self._turns.remove(job)
        job.phase = Phase.DECODING

    def ending(self, job: Job) -> None:
        """A job has its last token."""
        job.phase = Phase.ENDING

    def built(self, job: Job, now: float) -> bool:
        """A document of a job is in the store, or could not be put there. False where nothing is left to do for it."""
        del job.documents[0]
        self._build_is_over(job)
        if not job.documents and job.request is None:
            return False
        self._prepare(job, now)
        return True

    def busy(self, job: Job, now: float) -> bool:
        """Another process builds the document that a job wants. False where it has been waited for long enough."""
        assert job.times.building is not None
        if now - job.times.building >= _BUSY_S:
            return False
        self._build_is_over(job)
        job.phase, job.not_before = Phase.TO_BUILD, now + _AGAIN_S
        return True

    def _build_is_over(self, job: Job) -> None:
        self._turns.remove(job)
        # To the end: between two documents of a long list others get their turn.
        self._staged.remove(job)
        self._staged.append(job)

    def finished(self, job: Job) -> None:
        """A job has nothing left."""
        self._forget(job)

    @property
    def queued(self) -> int:
        return self.count(QUEUED)

    @property
    def holding(self) -> int:
        return self.count(HOLDING)
