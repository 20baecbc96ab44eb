"""What every rank does at rank 0's command. All ranks run the same commands in the same order on the same state."""

from __future__ import annotations

from dataclasses import dataclass

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.generate import Admitted, Generation, Running
from trt_redknot.engine.pool import PoolRows
from trt_redknot.engine.producer import Produced, Producer
from trt_redknot.engine.response import Response
from trt_redknot.engine.steps import Steps
from trt_redknot.errors import BusyError, CapacityError, RequestError, StoreError, TooLongError
from trt_redknot.request.file import make_request
from trt_redknot.serving.commands import Admit, Advance, Begin, Build, Command, Decode, Drop, Finish, Preload, Stop
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import ServingFault
from trt_redknot.serving.preload import Preloader
from trt_redknot.serving.stores import Stores

# Cache rows of an engine that could answer longer requests than most machines have memory for.
DEFAULT_CACHE_TOKENS = 65536
# Segments a request may have on average when the pool is full: each may end in a partial window of its own.
_SEGMENTS = 64


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A command failed on all ranks alike; the job is to be dropped, or, where it was `busy`, tried again later."""

    fault: ServingFault
    message: str
    busy: bool = False


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """An admission: pool rows and tokens the request needs, and why it is recomputed where it wanted reuse.

    `refused` is the index, among the request's artifacts, of the one that `reason` is about; None where it is of none.
    """

    size: PoolRows
    tokens: int
    reason: FallbackReason | None
    refused: int | None


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Steps were taken. `done` when they were the last ones."""

    done: bool
    produced: Produced | None = None


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The newest token of a job; `done` when it is the last one."""

    token: int
    done: bool


Outcome = Failed | Agreed | Advanced | Response | dict[int, Drawn] | None


@dataclass(kw_only=True, eq=False)
class _Held:
    """What one job holds on this rank."""

    admitted: Admitted | None = None
    running: Running | None = None
    steps: Steps[None] | None = None
    build: Steps[Produced] | None = None


def pool_rows(engine: Engine, config: ServingConfig) -> PoolRows:
    """Size of the cache pool of a service."""
    longest = engine.manifest.max_length
    tokens = min(longest, DEFAULT_CACHE_TOKENS) if config.cache_tokens is None else config.cache_tokens
    one = PoolRows.of_sequence(engine.geometry, tokens, config.max_batch * _SEGMENTS)
    return PoolRows(latents=one.latents, entries=one.entries, sequences=config.max_batch)


class RankRunner:
    """One rank's side. Not thread-safe: one thread runs all commands, in torch's inference mode."""

    def __init__(self, engine: Engine, config: ServingConfig, stores: Stores) -> None:
        self.engine = engine
        self._stores = stores
        self._alone = engine.collectives.size == 1
        self.generation: Generation = engine.open_generation(pool_rows(engine, config))
        self.preloader = Preloader(engine.collectives.rank, threads=config.loader_threads)
        self._held: dict[int, _Held] = {}

    @property
    def jobs(self) -> int:
        """Jobs that hold anything but preloaded artifacts."""
        return len(self._held)

    def size_of_document(self, tokens: int) -> PoolRows:
        """Pool rows that building a document of this length takes."""
        return Producer.size(self.engine.geometry, tokens)

    def run(self, command: Command) -> Outcome:
        """Do it. What is wrong with one request is a Failed on all ranks; what is raised ends the service."""
        match command:
            case Preload():
                self._preload(command)
            case Admit():
                return self._admit(command)
            case Begin():
                held = self._held[command.job]
                assert held.admitted is not None
                held.running = self.generation.begin(held.admitted)
                held.steps = self.generation.prefill(held.running)
            case Build():
                store = self._stores[command.tenant]
                # Another process that builds the same would be waited for by everybody here.
                build = self.engine.build_steps(
                    store, command.tokens, self.generation.pool, rebuild=command.rebuild, wait_s=0.0
                )
                self._held[command.job] = _Held(build=build)
            case Advance():
                return self._advance(command)
            case Decode():
                return self._decode(command)
            case Finish():
                running = self._held[command.job].running
                assert running is not None
                self.engine.check_stages()
                response = self.generation.respond(running)
                self._free(command.job)
                return response
            case Drop():
                self._free(command.job)
            case Stop():
                self.close()
        return None

    def close(self) -> None:
        """Free everything, on this rank alone."""
        for job in list(self._held):
            self._free(job)
        self.preloader.close()

    def _preload(self, command: Preload) -> None:
        self.preloader.submit(command.job, self._stores[command.tenant], command.artifact_ids)

    def _admit(self, command: Admit) -> Outcome:
        request = make_request(command.request)
        # Not in the try: a store that cannot be opened may be one rank's trouble alone, and the others go on to agree.
        store = self._stores[command.tenant]
        try:
            admitted = self.engine.admit(request, store, deadline_s=command.left_s)
        except (RequestError, StoreError) as error:
            return _failed(error)
        finally:
            # Leases of its own keep what was admitted from eviction.
            self.preloader.release(command.job)
        self._held[command.job] = _Held(admitted=admitted)
        return Agreed(
            size=Generation.size(self.engine.geometry, admitted),
            tokens=len(admitted.layout.tokens),
            reason=None if admitted.admission is None else admitted.admission.reason,
            refused=None if admitted.admission is None else admitted.admission.refused,
        )

    def _advance(self, command: Advance) -> Outcome:
        held = self._held[command.job]
        steps = held.build if held.build is not None else held.steps
        assert steps is not None
        try:
            for _ in range(command.steps):
                next(steps)
        except StopIteration as end:
            if held.admitted is None:
                self._free(command.job)
                return Advanced(done=True, produced=end.value)
            held.steps = None
            # Everything of the artifacts was read; the rest of the request needs none of them.
            held.admitted.close()
            return Advanced(done=True)
        except (RequestError, StoreError) as error:
            # A build fails on all ranks or on none. Of a prompt the same is not known where there are several.
            if held.build is None and not self._alone:
                raise
            self._free(command.job)
            return _failed(error)
        return Advanced(done=False)

    def _decode(self, command: Decode) -> Outcome:
        batch = [running for job in command.jobs if (running := self._held[job].running) is not None]
        self.generation.decode(batch)
        return {
            job: Drawn(token=running.tokens[-1], done=running.done)
            for job, running in zip(command.jobs, batch, strict=True)
        }

    def first(self, job: int) -> Drawn:
        """The first token of a job whose prompt is done."""
        running = self._held[job].running
        assert running is not None
        return Drawn(token=running.tokens[0], done=running.done)

    def _free(self, job: int) -> None:
        self.preloader.release(job)
        held = self._held.pop(job, None)
        if held is None:
            return
        for steps in (held.steps, held.build):
            if steps is not None:
                steps.close()
        if held.running is not None:
            self.generation.close(held.running)
        if held.admitted is not None:
            held.admitted.close()


def _failed(error: RequestError | StoreError) -> Failed:
    match error:
        case TooLongError() | CapacityError():
            fault = ServingFault.TOO_LARGE
        case RequestError():
            fault = ServingFault.INVALID_REQUEST
        case ArtifactError() if error.fault is ArtifactFault.MISSING:
            fault = ServingFault.MISSING_DOCUMENT
        case _:
            fault = ServingFault.INTERNAL
    return Failed(fault=fault, message=str(error), busy=isinstance(error, BusyError))
