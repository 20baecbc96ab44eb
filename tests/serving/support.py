"""What the tests of the service share: an engine, requests, and a service that is driven turn by turn."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.networks import NetworkOptions, build_engine, fp64, network, write_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.names import LEASE_LOCK
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.observability.serving import ServingMetrics
from trt_redknot.serving.conductor import COMPLETED, Conductor
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.intake import Intake
from trt_redknot.serving.jobs import Job
from trt_redknot.serving.link import LocalLink
from trt_redknot.serving.messages import BuildRequest, Event, ServingFault, ServingRequest
from trt_redknot.serving.stores import Stores

VOCAB = 257
POLICY = {"boundary": 4, "tail": 4, "top_entries": 2, "budget": 0.25}


def byte_tokenizer() -> Tokenizer:
    """A token a byte: half of a character is a usual thing."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_checkpoint(folder: Path, *, seed: int, tokenizer: bool = True, groups: int = 2) -> Path:
    options = NetworkOptions(
        kinds="schc", hash_layers=1, vocab=VOCAB, seed=seed, hca=8, window=8, topk=4, groups=groups, hidden=32,
        head_dim=16, rope_dim=4, index_heads=8, experts_per_token=4,
    )  # fmt: skip
    checkpoint = write_network(network(options), folder / "checkpoint")
    if tokenizer:
        byte_tokenizer().save(str(checkpoint / "tokenizer.json"))
    return checkpoint


def make_bench(folder: Path, *, seed: int, tokenizer: bool = True) -> Path:
    """A one-rank engine directory."""
    checkpoint = make_checkpoint(folder, seed=seed, tokenizer=tokenizer)
    return build_engine(checkpoint, folder / "engine", options=fp64(chunk_rows=16, max_length=400))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An engine that answers alone, and a store with some documents in its default namespace."""

    engine: Engine
    store: ArtifactStore
    documents: list[list[int]]
    artifact_ids: list[str]

    @classmethod
    def open(cls, engine_dir: Path, store_dir: Path) -> Bench:
        engine, store = Engine.open(engine_dir), ArtifactStore(store_dir)
        # Of 36 tokens the budget always has a window left to activate, whatever POLICY protects.
        documents = [ids(random.randrange(shortest, 45)) for shortest in (20, 36, 20)]
        built = [engine.build_artifact(store, document) for document in documents]
        return cls(engine=engine, store=store, documents=documents, artifact_ids=built)

    def alone(self, request: ServingRequest) -> Response:
        """The engine's own answer."""
        parts = [
            Tokens(each.tokens or []) if each.artifact is None else Artifact(each.artifact, tokens=each.tokens)
            for each in request.segments
        ]
        return self.engine.generate(
            Request(
                segments=parts, max_new_tokens=request.max_new_tokens, reuse=request.reuse,
                stop_tokens=request.stop_tokens,
            ),
            store=self.store,
        )  # fmt: skip


def ids(count: int) -> list[int]:
    return [random.randrange(256) for _ in range(count)]


def ask(segments: list[dict[str, Any]], steps: int = 6, *, reuse: bool = True, **more: Any) -> ServingRequest:
    policy = ReusePolicy(**POLICY) if reuse else None  # type: ignore[arg-type]
    values = {"max_new_tokens": steps, "stop_tokens": [], "reuse": policy and policy.model_dump(), **more}
    return ServingRequest.parse({"segments": segments, **values})


class Theatre:
    """A service without threads of its own but the preloader's: turns are taken by hand, and time is a number."""

    def __init__(self, bench: Bench, config: ServingConfig) -> None:
        self.now = 1000.0
        registry = CollectorRegistry()
        metrics = ServingMetrics([COMPLETED, *(fault.value for fault in ServingFault)], registry)
        stores = Stores(config=config)
        self.registry = registry
        self.conductor = Conductor.over(bench.engine, config, stores, LocalLink(), metrics, lambda: self.now)
        self.intake = Intake(
            engine=bench.engine, config=config, tokenizer=EngineTokenizer(config.engine),
            capacity=self.conductor.scheduler.room.capacity,
        )  # fmt: skip
        self._numbers = itertools.count()
        self.responses: dict[int, Response] = {}
        answer = self.conductor._answer
        self.conductor._answer = lambda job, response: (  # type: ignore[method-assign]
            self.responses.update({job.number: response}), answer(job, response),
        )[1]  # fmt: skip

    def submit(self, request: ServingRequest | BuildRequest) -> Job:
        job = self.intake.job(request, next(self._numbers), self.now, lambda job: setattr(job, "cancelled", True))
        self.conductor.scheduler.add(job)
        return job

    def turn(self) -> bool:
        with torch.inference_mode():
            return self.conductor.turn()

    def until(self, condition: Callable[[], bool], *, tick_s: float = 0.0) -> None:
        """Take turns until something is so; each adds to the time."""
        deadline = time.monotonic() + 60
        while not condition():
            assert self.conductor.scheduler.jobs, "everything is over, and what was waited for has not happened"
            if not self.turn():
                time.sleep(0.001)
            self.now += tick_s
            assert time.monotonic() < deadline, {
                job.number: job.phase for job in self.conductor.scheduler.jobs.values()
            }

    def finish(self) -> None:
        self.until(lambda: not self.conductor.scheduler.jobs)

    def assert_nothing_held(self) -> None:
        """No rows, no leases, no places, no memory of any job."""
        runner, scheduler = self.conductor.runner, self.conductor.scheduler
        pool = runner.generation.pool
        assert pool.free == pool.capacity
        tables = [*pool.latents, *pool.entries, *pool.index_keys, *(tail for tails in pool.tails for tail in tails)]
        assert all(bool(table.isnan().all()) for table in tables if table is not None)
        assert runner.jobs == 0
        assert runner.preloader.held == 0
        assert len(scheduler.waiting) == 0
        assert (scheduler.jobs, scheduler._staged, scheduler._turns, scheduler._sizes, scheduler._verified) == (
            {}, [], [], {}, {},
        )  # fmt: skip
        # A thread that was verifying for a job when it was dropped lets go as soon as it notices.
        deadline = time.monotonic() + 10
        while (left := open_leases()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not left


def open_leases() -> list[str]:
    """Lease locks that this process holds open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(entry)
            if target.endswith(LEASE_LOCK):
                found.append(target)
    return found


def outcome(job: Job) -> Event:
    """The last event of a job that is over."""
    events = list(job.stream)
    assert job.stream.complete
    return events[-1]
