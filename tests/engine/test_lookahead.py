"""Steps that are queued ahead change no answer: whoever stops, joins, is dropped or draws, and whatever was queued."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import UnsyncedFiles
from tests.support.networks import NetworkOptions, fp64, open_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, ReusePolicy, Tokens
from trt_redknot.engine.decode import Decoder, QueuedStep
from trt_redknot.engine.decode_numbers import NumbersMaker
from trt_redknot.engine.generate import Generation, Running
from trt_redknot.engine.lookahead import Asked, DecodeSteps
from trt_redknot.engine.pool import PoolRows, SequenceState
from trt_redknot.engine.steps import drain
from trt_redknot.request.request import Sampling

WINDOW = 32


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A layer of every kind, and windows that end often."""
    options = NetworkOptions(
        kinds="schc", hca=WINDOW, seed=random.randrange(2**31), experts=4, experts_per_token=3, heads_per_group=2
    )
    return open_network(tmp_path_factory.mktemp("lookahead"), options, build=fp64())[1]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store", files=UnsyncedFiles())


def tokens(engine: Engine, count: int) -> list[int]:
    return [random.randrange(engine.geometry.vocab) for _ in range(count)]


class Service:
    """A generation over a pool for some requests."""

    def __init__(
        self, engine: Engine, requests: Sequence[Request], store: ArtifactStore | None = None, *, ahead: bool = True
    ) -> None:
        self.admitted = [engine.admit(request, store) for request in requests]
        size = PoolRows.sum([Generation.size(engine.geometry, item) for item in self.admitted])
        pool = engine.open_generation(size).pool
        self.generation = Generation(engine._context, pool, ahead=ahead)

    def start(self, index: int) -> Running:
        running = self.generation.begin(self.admitted[index])
        drain(self.generation.prefill(running))
        return running


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every step that the device was given."""
    rows: list[int] = []
    queue = Decoder.queue

    def noted(self: Decoder, states: Sequence[SequenceState], fed: Any) -> QueuedStep:
        rows.append(len(states))
        return queue(self, states, fed)

    monkeypatch.setattr(Decoder, "queue", noted)
    return rows


@torch.inference_mode()
def test_steps_that_were_not_wanted_leave_no_trace(engine: Engine) -> None:
    """Before every step another one is queued for the same place, with a wrong token, and forgotten: bit for bit the
    answers of a decoder that never looked ahead, over windows of both kinds that end in between."""
    requests = [Request(segments=[Tokens(tokens(engine, n))], max_new_tokens=100) for n in (70, 41)]
    services = [Service(engine, requests) for _ in range(2)]
    states = [[service.start(index).state for index in range(2)] for service in services]
    plain, troubled = (Decoder(engine._context, service.generation.pool) for service in services)
    for _ in range(2 * WINDOW + 4):
        new, wrong = tokens(engine, 2), tokens(engine, 2)
        troubled.queue([state.grown() for state in states[1]], wrong)
        expected, found = plain.step(states[0], new), troubled.step(states[1], new)
        assert torch.equal(found, expected)


@torch.inference_mode()
@pytest.mark.parametrize("ahead", [True, False])
def test_requests_that_come_stop_and_go_get_their_own_tokens(engine: Engine, store: ArtifactStore, ahead: bool) -> None:
    """In any order and company every request gets the tokens that it gets alone, and nothing after its stop."""
    artifact = Artifact(engine.build_artifact(store, tokens(engine, 50)))
    segments = [[artifact, Tokens(tokens(engine, 9))], [Tokens(tokens(engine, 33))], [artifact, artifact, Tokens([1])]]
    policy = ReusePolicy(boundary=4, tail=8, top_entries=2, budget=0.2)
    wanted = []
    for each in segments:
        alone = engine.generate(
            Request(segments=each, max_new_tokens=random.randrange(12, 40), stop_tokens=[], reuse=policy), store=store
        )
        # Stops in the middle, or at its limit.
        stop = random.choice([alone.tokens[random.randrange(len(alone.tokens))], None])
        length = len(alone.tokens) if stop is None else alone.tokens.index(stop) + 1
        request = Request(
            segments=each, max_new_tokens=len(alone.tokens), stop_tokens=[] if stop is None else [stop], reuse=policy
        )
        wanted.append((request, alone.tokens[:length]))
    for _ in range(2):
        service = Service(engine, [request for request, _ in wanted], store, ahead=ahead)
        waiting, open_, dropped = [0, 1, 2], dict[int, Running](), set[int]()
        while waiting or any(not each.done for each in open_.values()):
            if waiting and (not open_ or random.random() < 0.3):
                index = waiting.pop()
                open_[index] = service.start(index)
            batch = [each for each in open_.values() if not each.done and random.random() < 0.9]
            if batch:
                service.generation.decode(batch)
            if random.random() < 0.02 and open_:
                index = random.choice(list(open_))
                dropped.add(index)
                service.generation.close(open_.pop(index))
        for index, each in open_.items():
            assert each.tokens == wanted[index][1]
            service.generation.close(each)
        pool = service.generation.pool
        assert pool.free == pool.capacity
        # Nothing that was queued ahead is left in the rows that were given back.
        assert all(table.isnan().all() for table in pool.latents)


@torch.inference_mode()
def test_the_next_step_is_queued_before_a_token_is_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(segments=[Tokens(tokens(engine, 20))], max_new_tokens=6, stop_tokens=[])
    service = Service(engine, [request])
    running = service.start(0)
    events: list[str] = []
    queue, read = Decoder.queue, QueuedStep.tokens

    def queues(self: Decoder, states: Sequence[SequenceState], fed: Any) -> QueuedStep:
        events.append("fed by the device" if isinstance(fed, torch.Tensor) else "fed by the host")
        return queue(self, states, fed)

    def reads(self: QueuedStep) -> list[int]:
        events.append("read")
        return read(self)

    monkeypatch.setattr(Decoder, "queue", queues)
    monkeypatch.setattr(QueuedStep, "tokens", reads)
    service.generation.decode([running])
    assert events == ["fed by the host", "fed by the device", "read"]
    while not running.done:
        service.generation.decode([running])
    # Five tokens follow the first: as many steps, and none beyond the limit.
    assert Counter(events)["fed by the device"] == 4
    assert Counter(events)["fed by the host"] == 1


@torch.inference_mode()
def test_who_leaves_costs_the_others_no_step(engine: Engine, queued: list[int]) -> None:
    """One reaches its limit, and one is dropped: the rest goes on with what was queued for all."""
    limits = (4, 9, 9)
    requests = [
        Request(segments=[Tokens(tokens(engine, 12 + n))], max_new_tokens=limit, stop_tokens=[])
        for n, limit in enumerate(limits)
    ]
    service = Service(engine, requests)
    running = [service.start(index) for index in range(3)]
    while not running[0].done:
        service.generation.decode(running)
    assert queued == [3, 3, 3, 2]
    service.generation.decode(running[1:])
    service.generation.close(running[1])
    while not running[2].done:
        service.generation.decode(running[2:])
    assert queued == [3, 3, 3, 2, 2, 1, 1, 1]
    assert running[2].tokens == engine.generate(requests[2]).tokens


@torch.inference_mode()
def test_a_token_that_the_caller_puts_in_place_of_the_chosen_one_counts(engine: Engine) -> None:
    request = Request(segments=[Tokens(tokens(engine, 20))], max_new_tokens=40, stop_tokens=[])
    services = [Service(engine, [request]) for _ in range(2)]
    states = [each.start(0).state for each in services]
    steps = DecodeSteps(Decoder(engine._context, services[0].generation.pool), ahead=True)
    plain = Decoder(engine._context, services[1].generation.pool)
    token = 3
    for turn in range(20):
        found = steps.next([Asked(state=states[0], token=token, greedy=True, last=False)]).tokens()[0]
        assert found == int(plain.step(states[1:], [token])[0].argmax())
        token = found if turn % 3 else (found + 1) % engine.geometry.vocab


@torch.inference_mode()
def test_who_draws_gets_the_same_tokens_and_numbers_that_were_made_ahead(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, queued: list[int]
) -> None:
    sampling = Sampling(temperature=1.3, seed=5)
    requests = [
        Request(segments=[Tokens(tokens(engine, 25))], max_new_tokens=12, stop_tokens=[], sampling=each)
        for each in (sampling, Sampling())
    ]
    wanted = [engine.generate(request).tokens for request in requests]
    made = []
    make = NumbersMaker.make

    def noted(self: NumbersMaker, states: Sequence[SequenceState]) -> Any:
        made.append(len(states))
        return make(self, states)

    monkeypatch.setattr(NumbersMaker, "make", noted)
    queued.clear()
    service = Service(engine, requests)
    running = [service.start(index) for index in range(2)]
    while not running[0].done:
        service.generation.decode(running)
    assert [each.tokens for each in running] == wanted
    assert len(made) == len(queued) == 11
