"""The service as its clients see it: requests in from any thread, streams of events out. What rank 0 runs."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from prometheus_client import CollectorRegistry, generate_latest

from trt_redknot.collectives import from_communicator
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.errors import ConfigError, EngineError
from trt_redknot.observability.logs import json_log
from trt_redknot.observability.metrics import StoreMetrics
from trt_redknot.observability.serving import ServingMetrics
from trt_redknot.serving.conductor import COMPLETED, Conductor
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.intake import Intake
from trt_redknot.serving.jobs import Job, kind_of
from trt_redknot.serving.link import Link, link_over
from trt_redknot.serving.messages import BuildRequest, Health, ServingError, ServingFault, ServingRequest, State
from trt_redknot.serving.runner import pool_rows
from trt_redknot.serving.scheduler import Scheduler
from trt_redknot.serving.stores import Stores
from trt_redknot.serving.stream import Stream

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_log = logging.getLogger("trt_redknot.serving")

# Seconds between two looks for what no command brings about: verified artifacts, deadlines.
_IDLE_S = 0.002
_WATCH_S = 0.5
# Seconds in which clients get to read that the service failed, before the job is ended.
_FAREWELL_S = 5.0
_CLOSE_S = 30.0


class Service:
    """Answers requests with one engine. Any thread may call. Open one with :meth:`open`.

    One thread of its own does everything collective. `close` it: it holds leases.
    """

    def __init__(self, config: ServingConfig, engine: Engine, link: Link) -> None:
        registry = CollectorRegistry()
        store_metrics = StoreMetrics(registry)
        self._registry = registry
        self._config = config
        self._link = link
        self._numbers = itertools.count()
        self._stores = Stores(config=config, events=lambda: store_metrics)
        # Refuses a store that is none before anything is promised.
        self._stores[config.namespace]
        self._intake = Intake(
            engine=engine, config=config, tokenizer=_tokenizer(config.engine), capacity=pool_rows(engine, config)
        )
        self._engine = engine
        self._metrics = ServingMetrics([COMPLETED, *(fault.value for fault in ServingFault)], registry)
        # Guards what follows, and wakes the thread.
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._state = State.STARTING
        self._detail: str | None = None
        self._closing = False
        self._jobs: dict[int, Job] = {}
        self._waiting = self._running = 0
        self._busy_since: float | None = None
        self._logs = contextlib.ExitStack()
        if config.log is not None:
            self._logs.enter_context(json_log(config.log))
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="redknot-engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="redknot-watch", daemon=True)

    @classmethod
    def open(cls, config: ServingConfig, comm: Intracomm | None = None) -> Service:
        """Open the engine and begin to serve. Collective: the other ranks call :func:`run_worker`.

        Args:
            comm: an mpi4py communicator of `config.world_size` ranks; None: one rank.

        Raises:
            EngineError: see :meth:`Engine.open`.
            StoreError: the store is no folder, or the log cannot be written.
            ConfigError: another number of ranks than the configuration says.
        """
        engine = open_engine(config, comm)
        service = cls(config, engine, link_over(comm))
        service._thread.start()
        service._started.wait()
        if service._state is State.UNHEALTHY:
            raise EngineError("the service cannot start", found=service._detail, path=config.engine)
        service._watcher.start()
        return service

    def submit(self, request: ServingRequest | BuildRequest) -> Stream:
        """Start a request. Returns at once; nothing waits for whoever reads the stream.

        Raises:
            ServingError: `invalid_request`, `too_large`, `queue_full`, `shutting_down` or `rank_failed`.
        """
        self._check_open()
        try:
            job = self._intake.job(request, next(self._numbers), time.monotonic(), self._cancel)
        except ServingError as error:
            self._metrics.ended(error.fault.value, kind_of(request))
            raise
        with self._wake:
            self._check_open()
            waiting = self._waiting + len(self._inbox)
            if waiting >= self._config.max_queue:
                self._metrics.ended(ServingFault.QUEUE_FULL.value, job.kind)
                raise ServingError(
                    ServingFault.QUEUE_FULL,
                    f"{waiting} requests wait and {self._running} run, expected fewer than {self._config.max_queue} "
                    "waiting. Send it again later.",
                )
            self._inbox.append(job)
            self._jobs[job.number] = job
            self._wake.notify_all()
        return job.stream

    def health(self) -> Health:
        """Now, from what the engine's thread said last."""
        with self._wake:
            return Health(
                state=self._state, world_size=self._link.size, waiting=self._waiting + len(self._inbox),
                running=self._running, detail=self._detail,
            )  # fmt: skip

    def metrics(self) -> str:
        """Everything counted on rank 0, in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    @property
    def registry(self) -> CollectorRegistry:
        """To be served or combined with others."""
        return self._registry

    def close(self) -> None:
        """Fail what is open with `shutting_down`, end the other ranks' loops, free everything. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._break("the engine's thread does not end", ServingFault.SHUTTING_DOWN)
        self._logs.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._state is State.UNHEALTHY:
            fault = ServingFault.RANK_FAILED if self._link.size > 1 else ServingFault.INTERNAL
            raise ServingError(fault, f"the service has failed: {self._detail}")
        if self._closing:
            raise ServingError(ServingFault.SHUTTING_DOWN, "the service ends")

    def _cancel(self, job: Job) -> None:
        with self._wake:
            job.cancelled = True
            self._wake.notify_all()

    @torch.inference_mode()
    def _work(self) -> None:
        conductor: Conductor | None = None
        try:
            if self._engine.device.type == "cuda":
                # A thread of its own starts at GPU 0, whatever the thread did that opened the engine.
                torch.cuda.set_device(self._engine.device)
            conductor = Conductor.over(
                self._engine, self._config, self._stores, self._link, self._metrics, time.monotonic
            )
            with self._wake:
                self._state = State.READY
            self._started.set()
            self._serve(conductor)
            conductor.stop()
            with self._wake:
                self._state = State.CLOSED
        finally:
            failure = sys.exception()
            if failure is not None:
                self._break(
                    f"{type(failure).__name__}: {failure}",
                    ServingFault.RANK_FAILED if self._link.size > 1 else ServingFault.INTERNAL,
                )
            self._started.set()
            if conductor is not None:
                conductor.runner.close()

    def _serve(self, conductor: Conductor) -> None:
        scheduler = conductor.scheduler
        while self._take(scheduler):
            done = conductor.turn()
            with self._wake:
                self._waiting, self._running = scheduler.queued, scheduler.holding
                self._jobs = dict(scheduler.jobs) | {job.number: job for job in self._inbox}
                self._busy_since = None
                if not done and not self._inbox and not self._closing:
                    # With nothing at all to do only a client can change that.
                    self._wake.wait(_IDLE_S if scheduler.jobs else None)

    def _take(self, scheduler: Scheduler) -> bool:
        """Hand new jobs over. False where the service is to end."""
        with self._wake:
            for job in self._inbox:
                scheduler.add(job)
            self._waiting += len(self._inbox)
            self._inbox = []
            self._busy_since = time.monotonic()
            return not self._closing

    def _watch(self) -> None:
        """End the service when one turn takes too long: a rank is lost or hangs, and nobody else would notice."""
        limit = self._config.stall_s
        while self._thread.is_alive():
            self._thread.join(_WATCH_S)
            with self._wake:
                since = self._busy_since if self._state is State.READY else None
            if since is not None and time.monotonic() - since > limit:
                self._break(f"one turn took more than {limit:g} s", ServingFault.RANK_FAILED)
                return

    def _break(self, detail: str, fault: ServingFault) -> None:
        """Nothing more will be answered: say so to everybody, then end the job where other ranks belong to it."""
        with self._wake:
            self._state, self._detail = State.UNHEALTHY, detail
            jobs = {job.number: job for job in [*self._jobs.values(), *self._inbox]}
        _log.error("the service has failed: %s", detail, extra={"event": "failed", "detail": detail})
        for job in jobs.values():
            if job.stream.complete:
                # In the turn that broke, and counted then.
                continue
            self._metrics.ended(fault.value, job.kind)
            job.fail(fault, f"the service has failed: {detail}")
        if self._link.size > 1:
            timer = threading.Timer(_FAREWELL_S, self._link.abort)
            timer.daemon = True
            timer.start()


def open_engine(config: ServingConfig, comm: Intracomm | None) -> Engine:
    """The engine of a service, on every rank. Raises EngineError and ConfigError; on all ranks."""
    size = from_communicator(comm).size
    if size != config.world_size:
        raise ConfigError(
            "the service has another number of ranks than its configuration says", expected=config.world_size,
            found=size, remedy="Start as many ranks as world_size says.",
        )  # fmt: skip
    return Engine.open(config.engine, comm, verify=config.verify, device=config.device)


def _tokenizer(engine: Path) -> EngineTokenizer | None:
    if not (engine / EngineTokenizer.FILE).is_file():
        return None
    return EngineTokenizer(engine)
