"""The scheduler over a real engine, turn by turn: companions change no answer, and what ends leaves nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.support import POLICY, Bench, Theatre, ask, ids, outcome
from trt_redknot import ArtifactStore, Response
from trt_redknot.artifacts import folder
from trt_redknot.artifacts import store as store_module
from trt_redknot.artifacts.locks import FileLock
from trt_redknot.errors import BusyError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.jobs import Job, Phase
from trt_redknot.serving.messages import (
    BuildRequest,
    BuiltEvent,
    DoneEvent,
    FailedEvent,
    ServingFault,
    ServingRequest,
    TokenEvent,
)


@pytest.fixture(scope="module")
def settings_of(engine_dir: Path, bench: Bench) -> ServingConfig:
    return ServingConfig(
        engine=engine_dir, store=bench.store.root, cache_tokens=300, max_batch=3, prefill_steps=5, lookahead=2,
        max_queue=100, stall_s=1e9,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stage(bench: Bench, settings_of: ServingConfig) -> Iterator[Theatre]:
    theatre = Theatre(bench, settings_of)
    yield theatre
    theatre.conductor.runner.close()


@pytest.fixture(scope="module")
def known(bench: Bench) -> list[tuple[ServingRequest, Response]]:
    """Requests of every kind, with the engine's own answers."""
    one, two, three = ({"artifact": artifact_id} for artifact_id in bench.artifact_ids)
    requests = [
        ask([one, two, {"tokens": ids(9)}], 7),
        ask([three, {"tokens": ids(4)}], 1),
        ask([two, {"tokens": ids(3)}, one], 9),
        ask([{"tokens": ids(30)}], 12, reuse=False),
        ask([one, {"tokens": ids(6)}], 5, reuse=False),
        ask([{"tokens": ids(1)}], 3),
    ]
    answers = [(request, bench.alone(request)) for request in requests]
    assert {answer.report.arm for _, answer in answers} == {"reuse", "recompute"}
    assert any(answer.report.rows.active for _, answer in answers)
    return answers


def assert_same(job: Job, answer: Response) -> None:
    events = list(job.stream)
    done = events[-1]
    assert isinstance(done, DoneEvent), done
    assert list(done.tokens) == [each.token for each in events if isinstance(each, TokenEvent)] == answer.tokens
    expected = answer.report.to_json()
    for key in ("arm", "fallback_reason", "rows", "ledgers", "k_histogram"):
        assert done.report[key] == expected[key]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 40)), min_size=2, max_size=7),
    data=st.data(),
)
def test_interleaving_changes_no_answer(
    stage: Theatre,
    known: list[tuple[ServingRequest, Response]],
    arrivals: list[tuple[int, int, int]],
    data: st.DataObject,
) -> None:
    """Requests come after some turns each, and some are cancelled after some more: the others answer as if alone."""
    jobs: list[tuple[Job, Response, bool]] = []
    for which, pause, patience in arrivals:
        request, answer = known[which]
        jobs.append((stage.submit(request), answer, False))
        for _ in range(pause):
            stage.turn()
        if data.draw(st.integers(0, 3)) == 0:
            for _ in range(patience):
                stage.turn()
            number = data.draw(st.integers(0, len(jobs) - 1))
            job, answer, _ = jobs[number]
            job.stream.cancel()
            jobs[number] = (job, answer, True)
    stage.finish()
    for job, answer, cancelled in jobs:
        if cancelled and isinstance(last := outcome(job), FailedEvent):
            assert last.fault is ServingFault.CANCELLED
        elif not cancelled:
            assert_same(job, answer)
            assert torch.equal(stage.responses[job.number].first_logits, answer.first_logits)
    stage.assert_nothing_held()


ARRIVAL = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["tokens", "artifacts", "documents", "build", "nobody has it"]),
        "missing": st.sampled_from(["recompute", "build", "refuse"]),
        "reuse": st.booleans(),
        "tenant": st.sampled_from(["one", "two"]),
        "length": st.integers(1, 60),
        "steps": st.integers(1, 10),
        "deadline_s": st.sampled_from([None, None, 3.0, 20.0]),
        "pause": st.integers(0, 15),
        "cancel": st.sampled_from([None, None, None, 0, 4, 30]),
        "stop": st.booleans(),
    }
)


def make_message(bench: Bench, arrival: dict[str, Any], documents: list[list[int]]) -> ServingRequest | BuildRequest:
    envelope = {"tenant": arrival["tenant"], "deadline_s": arrival["deadline_s"]}
    if arrival["kind"] == "build":
        return BuildRequest.parse({"documents": [{"tokens": each} for each in documents], **envelope})
    named = {
        "tokens": [],
        "artifacts": [{"artifact": bench.store.artifact_id(each, bench.engine.identity)} for each in documents],
        "documents": [{"tokens": each} for each in documents],
        "nobody has it": [{"artifact": "0" * 32}],
    }[arrival["kind"]]
    return ServingRequest.parse(
        {
            "documents": named, "question": ids(arrival["length"]), "missing": arrival["missing"],
            "reuse": POLICY if arrival["reuse"] else None, "max_new_tokens": arrival["steps"], "stop_tokens": [],
            "stop": ["a", "\u20ac"] if arrival["stop"] else [], **envelope,
        }
    )  # fmt: skip


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(arrivals=st.lists(ARRIVAL, min_size=3, max_size=8), ticks=st.sampled_from([0.0, 0.05, 0.5]))
def test_any_mix_comes_to_its_end_and_leaves_nothing(
    bench: Bench, stage: Theatre, arrivals: list[dict[str, Any]], ticks: float
) -> None:
    """Builds, answers, refusals, deadlines and cancellations of two tenants, over documents that come into being."""
    documents = [ids(random.randrange(5, 40)) for _ in range(2)]
    jobs: list[tuple[Job, dict[str, Any]]] = []
    patience: dict[int, int] = {}

    def turn() -> None:
        stage.turn()
        stage.now += ticks
        for job, _ in jobs:
            left = patience.get(job.number)
            if left is not None:
                patience[job.number] = left - 1
                if left == 0:
                    job.stream.cancel()

    for arrival in arrivals:
        job = stage.submit(make_message(bench, arrival, documents))
        jobs.append((job, arrival))
        if arrival["cancel"] is not None:
            patience[job.number] = arrival["cancel"]
        for _ in range(arrival["pause"]):
            turn()
    while stage.conductor.scheduler.jobs:
        turn()
    for job, arrival in jobs:
        last = outcome(job)
        allowed = {ServingFault.MISSING_DOCUMENT} if arrival["kind"] != "tokens" else set()
        allowed |= {ServingFault.CANCELLED} if arrival["cancel"] is not None else set()
        allowed |= {ServingFault.DEADLINE} if arrival["deadline_s"] is not None else set()
        assert isinstance(last, DoneEvent) or last.fault in allowed, (last, arrival)
        if isinstance(last, DoneEvent) and last.finish_reason == "length":
            assert len(last.tokens) == arrival["steps"]
    stage.assert_nothing_held()


PHASES = [phase for phase in Phase if phase is not Phase.OVER]


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_job_that_ends_in_any_phase_leaves_nothing(
    bench: Bench, stage: Theatre, known: list[tuple[ServingRequest, Response]], phase: Phase, way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Others that run at the time answer as if alone."""
    request, answer = known[0]
    companion = stage.submit(request)
    document = ids(33)
    victim = stage.submit(
        ServingRequest.parse(
            {
                "documents": [{"tokens": document}, {"artifact": bench.artifact_ids[0]}], "question": ids(40),
                "max_new_tokens": 12, "missing": "build", "stop_tokens": [], "deadline_s": 5.0,
            }
        )
    )  # fmt: skip
    scheduler = stage.conductor.scheduler
    with monkeypatch.context() as patch:
        if phase in (Phase.TO_BUILD, Phase.READY, Phase.ADMITTED):
            # Phases in which a job stays only while it has to wait for others.
            start = scheduler._start
            patch.setattr(scheduler, "_start", lambda now: [] if victim.phase is phase else start(now))
        if phase is Phase.LOADING:
            patch.setattr(stage.conductor.runner.preloader, "finished", list)
        if phase is not Phase.WAITING:
            stage.until(lambda: victim.phase is phase)
        assert victim.phase is phase
        if way == "cancelled":
            victim.stream.cancel()
        else:
            stage.now += 6.0
        stage.turn()
        assert victim.phase is Phase.OVER
        last = outcome(victim)
        assert isinstance(last, FailedEvent)
        assert last.fault.value == way
        if phase is Phase.LOADING:
            companion.stream.cancel()
            stage.finish()
    stage.finish()
    if phase is not Phase.LOADING:
        assert_same(companion, answer)
    stage.assert_nothing_held()


def test_decode_goes_on_while_prompts_run(stage: Theatre, settings_of: ServingConfig) -> None:
    """Between two tokens of an answer there are never more prompt steps than `prefill_steps`."""
    talker = stage.submit(ask([{"tokens": ids(3)}], 40, reuse=False))
    stage.until(lambda: talker.phase is Phase.DECODING)
    reader = stage.submit(ask([{"tokens": ids(200)}], 1, reuse=False))
    stage.until(lambda: reader.phase is Phase.PREFILLING)
    turns = 0
    while reader.phase is Phase.PREFILLING and talker.phase is Phase.DECODING:
        before = len(talker.tokens)
        stage.turn()
        turns += 1
        assert len(talker.tokens) == before + 1
    assert turns > 3
    stage.finish()
    stage.assert_nothing_held()


def test_prompts_run_by_turns(stage: Theatre) -> None:
    """A short prompt that comes after a long one has its first token long before the long one has."""
    long = stage.submit(ask([{"tokens": ids(250)}], 1, reuse=False))
    stage.until(lambda: long.phase is Phase.PREFILLING)
    short = stage.submit(ask([{"tokens": ids(5)}], 1, reuse=False))
    stage.until(lambda: short.phase is Phase.OVER)
    assert long.phase is Phase.PREFILLING
    stage.finish()
    stage.assert_nothing_held()


def test_tenants_take_turns(stage: Theatre) -> None:
    """One tenant's hundred requests do not keep another's one waiting for more than what was on its way already."""
    crowd = [stage.submit(ask([{"tokens": ids(4)}], 2, reuse=False, tenant="crowd")) for _ in range(30)]
    for _ in range(3):
        stage.turn()
    alone = stage.submit(ask([{"tokens": ids(4)}], 2, reuse=False, tenant="alone"))
    stage.until(lambda: alone.phase is Phase.OVER)
    finished = sum(job.phase is Phase.OVER for job in crowd)
    scheduler, config = stage.conductor.scheduler, stage.intake.config
    assert finished <= config.max_batch + config.lookahead + config.max_batch
    assert scheduler.queued
    stage.finish()
    assert all(isinstance(outcome(job), DoneEvent) for job in crowd)
    stage.assert_nothing_held()


def test_a_large_request_is_not_overtaken_forever(stage: Theatre) -> None:
    """It waits for room while others run, and nobody who came later takes the room."""
    first = [stage.submit(ask([{"tokens": ids(100)}], 20, reuse=False)) for _ in range(2)]
    stage.until(lambda: all(job.phase is Phase.DECODING for job in first))
    large = stage.submit(ask([{"tokens": ids(250)}], 2, reuse=False))
    later = [stage.submit(ask([{"tokens": ids(4)}], 2, reuse=False)) for _ in range(4)]
    stage.until(lambda: large.phase is Phase.ADMITTED)
    stage.until(lambda: all(job.phase is Phase.OVER for job in first))
    assert all(job.phase in (Phase.WAITING, Phase.READY) for job in later)
    stage.finish()
    assert isinstance(outcome(large), DoneEvent)
    stage.assert_nothing_held()


def test_a_deadline_holds_for_an_answer_that_runs(stage: Theatre) -> None:
    job = stage.submit(ask([{"tokens": ids(3)}], 50, reuse=False, deadline_s=5.0))
    stage.until(lambda: job.phase is Phase.OVER, tick_s=0.5)
    events = list(job.stream)
    assert isinstance(events[-1], FailedEvent)
    assert events[-1].fault is ServingFault.DEADLINE
    assert 0 < len(events) - 1 < 50
    stage.assert_nothing_held()


def test_builds_are_jobs_and_run_beside_answers(bench: Bench, stage: Theatre) -> None:
    documents = [ids(40), bench.documents[0], ids(25)]
    build = stage.submit(BuildRequest.parse({"documents": [{"tokens": each} for each in documents]}))
    stage.until(lambda: build.phase is Phase.BUILDING)
    answered = stage.submit(ask([{"tokens": ids(5)}], 3, reuse=False))
    stage.until(lambda: answered.phase is Phase.OVER)
    assert build.phase is not Phase.OVER, "the answer waited for the builds"
    stage.finish()
    events = list(build.stream)
    built = [event for event in events if isinstance(event, BuiltEvent)]
    assert [event.built for event in built] == [True, False, True]
    assert [event.tokens for event in built] == [40, len(bench.documents[0]), 25]
    assert [event.artifact_id for event in built] == [
        bench.store.artifact_id(each, bench.engine.identity) for each in documents
    ]
    for event in built:
        with bench.store.open(event.artifact_id) as lease:
            assert sum(file.size for file in lease.certificate.files) == event.bytes > 0
    last = events[-1]
    assert isinstance(last, DoneEvent)
    assert last.finish_reason == "built"
    assert last.report["documents"] == [event.to_json() for event in built]
    stage.assert_nothing_held()


def test_a_cancelled_build_leaves_the_store_as_it_was(bench: Bench, stage: Theatre) -> None:
    document = ids(44)
    build = stage.submit(BuildRequest.parse({"documents": [{"tokens": document}]}))
    stage.until(lambda: build.phase is Phase.BUILDING)
    build.stream.cancel()
    stage.finish()
    assert bench.store.newest(bench.store.artifact_id(document, bench.engine.identity)) is None
    assert list((bench.store.root / ".building").iterdir()) == []
    again = stage.submit(BuildRequest.parse({"documents": [{"tokens": document}]}))
    stage.finish()
    assert isinstance(outcome(again), DoneEvent)
    stage.assert_nothing_held()


def test_a_document_that_another_process_builds_is_waited_for(bench: Bench, stage: Theatre) -> None:
    """Not by the engine's thread: others are answered meanwhile. Then it is there, or is built after all."""
    document = ids(30)
    artifact_id = bench.store.artifact_id(document, bench.engine.identity)
    other = ArtifactStore(bench.store.root)
    lock = other._folder.build_lock(artifact_id, 1.0)
    build = stage.submit(BuildRequest.parse({"documents": [{"tokens": document}]}))
    stage.until(lambda: build.not_before > 0)
    answered = stage.submit(ask([{"tokens": ids(5)}], 3, reuse=False))
    stage.until(lambda: answered.phase is Phase.OVER)
    assert build.phase is Phase.TO_BUILD
    lock.close()
    stage.until(lambda: build.phase is Phase.OVER, tick_s=0.1)
    assert isinstance(outcome(build), DoneEvent)
    stage.assert_nothing_held()


def test_a_store_that_another_process_changes_is_not_waited_for(
    bench: Bench, stage: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that meets the store's lock is tried again later; others are answered meanwhile."""
    patience: list[float] = []
    acquire = folder.acquire

    def counting(*args: Any, timeout_s: float, **more: Any) -> FileLock:
        patience.append(timeout_s)
        return acquire(*args, timeout_s=min(timeout_s, 0.1), **more)

    lock = ArtifactStore(bench.store.root)._folder.mutex()
    monkeypatch.setattr(folder, "acquire", counting)
    build = stage.submit(BuildRequest.parse({"documents": [{"tokens": ids(30)}]}))
    stage.until(lambda: build.not_before > 0)
    assert patience == [0.0, 0.0]
    answered = stage.submit(ask([{"tokens": ids(5)}], 3, reuse=False))
    stage.until(lambda: answered.phase is Phase.OVER)
    assert build.phase is Phase.TO_BUILD
    lock.close()
    stage.until(lambda: build.phase is Phase.OVER, tick_s=0.1)
    assert isinstance(outcome(build), DoneEvent)
    # Published after all, with a short patience for the lock.
    assert max(patience) == 2.0
    stage.assert_nothing_held()


def test_admission_does_not_wait_for_a_process_that_removes_an_artifact(
    bench: Bench, stage: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    def locked(*_: object, timeout_s: float, **__: object) -> None:
        if threading.current_thread() is threading.main_thread():
            patience.append(timeout_s)
        raise BusyError("an artifact stayed locked")

    monkeypatch.setattr(store_module, "take_lease", locked)
    segments = [{"artifact": bench.artifact_ids[0], "tokens": bench.documents[0]}, {"tokens": ids(3)}]
    request = ask(segments, 2)
    assert request.reuse is not None
    request = request.model_copy(update={"reuse": request.reuse.model_copy(update={"deadline_s": 1e6})})
    job = stage.submit(request)
    stage.finish()
    answer = outcome(job)
    assert isinstance(answer, DoneEvent)
    assert answer.report["fallback_reason"] == "timeout"
    assert patience == [2.0]
    stage.assert_nothing_held()


def test_a_document_that_another_process_never_finishes(bench: Bench, stage: Theatre) -> None:
    document = ids(30)
    artifact_id = bench.store.artifact_id(document, bench.engine.identity)
    with ArtifactStore(bench.store.root)._folder.build_lock(artifact_id, 1.0):
        build = stage.submit(BuildRequest.parse({"documents": [{"tokens": document}]}))
        values = {
            "documents": [{"tokens": document}], "question": [1, 2], "max_new_tokens": 2, "missing": "build",
            "reuse": {"deadline_s": 1e6},
        }  # fmt: skip
        asked = stage.submit(ServingRequest.parse(values))
        stage.until(lambda: build.phase is asked.phase is Phase.OVER, tick_s=20.0)
    last = outcome(build)
    assert isinstance(last, FailedEvent)
    assert "stayed locked" in last.message
    answer = outcome(asked)
    assert isinstance(answer, DoneEvent)
    assert answer.report["fallback_reason"] == "missing_artifact"
    stage.assert_nothing_held()


@pytest.mark.parametrize("missing", ["recompute", "build", "refuse"])
def test_documents_that_are_not_in_the_store(bench: Bench, stage: Theatre, missing: str) -> None:
    document, question = ids(36), ids(4)
    values = {
        "documents": [{"tokens": bench.documents[0]}, {"tokens": document}], "question": question, "missing": missing,
        "max_new_tokens": 4, "stop_tokens": [],
    }  # fmt: skip
    job = stage.submit(ServingRequest.parse(values))
    stage.finish()
    last = outcome(job)
    if missing == "refuse":
        assert isinstance(last, FailedEvent)
        assert last.fault is ServingFault.MISSING_DOCUMENT
        for told in ("document 1 of the request", id_of(bench.store, bench, document), str(bench.store.root), "default",
                     "artifacts build --engine"):  # fmt: skip
            assert told in last.message, told
    else:
        assert isinstance(last, DoneEvent)
        assert last.report["arm"] == ("reuse" if missing == "build" else "recompute")
        assert last.report["fallback_reason"] == (None if missing == "build" else "missing_artifact")
        alone = ask(
            [{"artifact": id_of(bench.store, bench, each), "tokens": each} for each in (bench.documents[0], document)]
            + [{"tokens": question}],
            4,
        )
        default = alone.model_copy(update={"reuse": ServingRequest.parse(values).reuse})
        assert list(last.tokens) == bench.alone(default).tokens
    stage.assert_nothing_held()


def id_of(store: ArtifactStore, bench: Bench, document: list[int]) -> str:
    return store.artifact_id(document, bench.engine.identity)


def test_a_document_that_nobody_has(bench: Bench, stage: Theatre) -> None:
    for reuse in (True, False):
        job = stage.submit(
            ask([{"artifact": bench.artifact_ids[0]}, {"artifact": "0" * 32}, {"tokens": [1]}], reuse=reuse)
        )
        stage.finish()
        last = outcome(job)
        assert isinstance(last, FailedEvent)
        assert last.fault is ServingFault.MISSING_DOCUMENT
        for told in ("no rank can read the tokens", "0" * 32, "document 1 of the request", str(bench.store.root),
                     "artifacts build --engine ENGINE"):  # fmt: skip
            assert told in last.message, told
    stage.assert_nothing_held()


def test_a_request_too_large_for_the_cache_is_known_at_admission_at_the_latest(bench: Bench, stage: Theatre) -> None:
    """Of artifacts without tokens nobody knows the length before."""
    copies = 310 // len(bench.documents[0]) + 1
    job = stage.submit(ask([{"artifact": bench.artifact_ids[0]}] * copies + [{"tokens": [1]}], 10))
    stage.finish()
    last = outcome(job)
    assert isinstance(last, FailedEvent)
    assert last.fault is ServingFault.TOO_LARGE
    longer = stage.submit(ask([{"artifact": bench.artifact_ids[0]}] * copies + [{"tokens": [1]}], 90))
    stage.finish()
    last = outcome(longer)
    assert isinstance(last, FailedEvent)
    assert last.fault is ServingFault.TOO_LARGE
    assert "at most 400 tokens" in last.message
    stage.assert_nothing_held()


def test_artifacts_that_are_not_verified_in_time_are_not_waited_for(
    bench: Bench, stage: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.conductor.runner.preloader, "finished", list)
    request = ask([{"artifact": bench.artifact_ids[0]}, {"tokens": ids(3)}], 3)
    limited = request.model_copy(update={"reuse": request.reuse.model_copy(update={"deadline_s": 2.0})})  # type: ignore[union-attr]
    job = stage.submit(limited)
    stage.turn()
    assert job.phase is Phase.LOADING
    stage.now += 3.0
    stage.finish()
    last = outcome(job)
    assert isinstance(last, DoneEvent)
    assert last.report["arm"] == "recompute"
    assert last.report["fallback_reason"] == "timeout"
    stage.assert_nothing_held()


def test_artifacts_that_were_verified_wait_for_their_turn(
    bench: Bench, stage: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy allows for admission is not spent while others hold all places."""
    request = ask([{"artifact": bench.artifact_ids[1]}, {"tokens": ids(3)}], 3)
    limited = request.model_copy(update={"reuse": request.reuse.model_copy(update={"deadline_s": 2.0})})  # type: ignore[union-attr]
    job = stage.submit(limited)
    with monkeypatch.context() as patch:
        patch.setattr(stage.conductor.scheduler, "_start", lambda now: [])
        stage.until(lambda: job.phase is Phase.READY)
        stage.now += 100.0
        stage.turn()
    stage.finish()
    last = outcome(job)
    assert isinstance(last, DoneEvent)
    assert last.report["arm"] == "reuse"


def test_random_sizes_of_everything(
    bench: Bench, engine_dir: Path, known: list[tuple[ServingRequest, Response]]
) -> None:
    """Other limits, other order: the same answers."""
    for _ in range(3):
        config = ServingConfig(
            engine=engine_dir, store=bench.store.root, cache_tokens=random.randrange(150, 400),
            max_batch=random.randrange(1, 6), prefill_steps=random.randrange(1, 60), lookahead=random.randrange(1, 5),
            max_prefills=random.randrange(1, 4),
        )  # fmt: skip
        theatre = Theatre(bench, config)
        jobs = [(theatre.submit(request), answer) for request, answer in random.sample(known * 2, 9)]
        theatre.finish()
        for job, answer in jobs:
            assert_same(job, answer)
        theatre.assert_nothing_held()
        theatre.conductor.runner.close()
