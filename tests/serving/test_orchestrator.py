"""A service behind a socket: ranks that this process starts, follows, and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.support import Bench, ask, ids
from tests.support.triton import alive, descendants, wait_until_gone
from trt_redknot.errors import LaunchError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import (
    BuildRequest,
    BuiltEvent,
    DoneEvent,
    FailedEvent,
    Health,
    ServingError,
    ServingFault,
    ServingRequest,
    State,
    TokenEvent,
)
from trt_redknot.serving.orchestrator import Orchestrator
from trt_redknot.serving.rank import FrontEndLink
from trt_redknot.serving.rankjob import RankJob
from trt_redknot.serving.socket import MAX_FRAME_BYTES, Channel, ChannelError, Listener, connect
from trt_redknot.serving.stream import Stream

TIMEOUT_S = 120.0


@contextlib.contextmanager
def orchestrated(config: ServingConfig) -> Iterator[Orchestrator]:
    service = Orchestrator.open(config, start_timeout_s=TIMEOUT_S)
    below = descendants(os.getpid())
    try:
        yield service
    finally:
        service.close()
        wait_until_gone({pid: below.get(pid, "?") for pid in service.processes}, 30)


def test_it_answers_like_the_engine_and_ends_in_order(config: ServingConfig, bench: Bench) -> None:
    with orchestrated(config) as service:
        assert service.health() == Health(state=State.READY, world_size=1, waiting=0, running=0)
        request = ask([{"artifact": bench.artifact_ids[0]}, {"tokens": ids(8)}])
        stream = service.submit(request)
        events = list(stream)
        end = events[-1]
        assert isinstance(end, DoneEvent)
        assert list(end.tokens) == list(bench.alone(request).tokens)
        assert [event.token for event in events if isinstance(event, TokenEvent)] == list(end.tokens)
        built = list(service.submit(BuildRequest.parse({"documents": [{"tokens": ids(21)}]})))
        assert [event.built for event in built if isinstance(event, BuiltEvent)] == [True]
        with pytest.raises(ServingError) as caught:
            service.submit(ask([{"tokens": [10**6]}])).result()
        assert caught.value.fault is ServingFault.INVALID_REQUEST
        assert "redknot_" in service.metrics()

        cancelled = service.submit(ask([{"tokens": ids(5)}], 300, reuse=False))
        cancelled.poll(TIMEOUT_S)
        cancelled.cancel()
        with pytest.raises(ServingError) as caught:
            cancelled.result()
        assert caught.value.fault is ServingFault.CANCELLED

        left_open = service.submit(ask([{"tokens": ids(5)}], 300, reuse=False))
        left_open.poll(TIMEOUT_S)
        service.close()
        with pytest.raises(ServingError) as caught:
            left_open.result()
        assert caught.value.fault is ServingFault.SHUTTING_DOWN
        assert service.health().state is State.CLOSED
        with pytest.raises(ServingError, match="closed"):
            service.submit(request)
        service.close()


def test_a_killed_rank_is_noticed_at_once(config: ServingConfig) -> None:
    with orchestrated(config) as service:
        # Each takes more than half of the cache, so one runs at a time. On a busy machine the first ones may have ended
        # before the rank does; the last ones have not begun.
        streams = [service.submit(ask([{"tokens": ids(5)}], 300, reuse=False)) for _ in range(6)]
        streams[0].poll(TIMEOUT_S)
        job, rank = service.processes
        os.kill(rank, signal.SIGKILL)
        for stream in streams[3:]:
            with pytest.raises(ServingError, match="rank 0 is gone") as caught:
                stream.result()
            assert caught.value.fault is ServingFault.RANK_FAILED
        assert service.health().state is State.UNHEALTHY
        with pytest.raises(ServingError) as refused:
            service.submit(ask([{"tokens": ids(5)}]))
        assert refused.value.fault is ServingFault.RANK_FAILED
        deadline = time.monotonic() + 30
        while alive(job) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(job)


def test_a_refused_engine_is_told_and_leaves_nothing(config: ServingConfig, tmp_path: Path) -> None:
    below = set(descendants(os.getpid()))
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"do not serve: .*engine\.json"):
        Orchestrator.open(config.model_copy(update={"engine": tmp_path}), start_timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S
    assert set(descendants(os.getpid())) <= below


def test_a_start_that_takes_too_long_is_ended(config: ServingConfig) -> None:
    below = set(descendants(os.getpid()))
    with pytest.raises(LaunchError, match="not ready after"):
        Orchestrator.open(config, start_timeout_s=0.2)
    assert set(descendants(os.getpid())) <= below


class FakeJob:
    """Ranks of which the test says what sending to them does. They are there until the test ends the service."""

    def __init__(self) -> None:
        self.fault: ChannelError | None = None

    def follow(self) -> None:
        """Nothing connects."""

    def send(self, message: object) -> None:
        if self.fault is not None:
            raise self.fault

    def stop(self, patience_s: float) -> None:
        """Nothing runs."""


def test_a_rank_that_is_gone_is_no_fault_of_the_request(config: ServingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of rank 0's connection and the moment at which its reader has told of it."""
    job = FakeJob()
    monkeypatch.setattr(RankJob, "start", lambda *_: job)
    service = Orchestrator(config)
    service._handle(0, {"op": "ready"})
    here, there = (Channel(end, limit=1000) for end in socket.socketpair())
    there.close()
    for message, fault in (({"text": "x" * 1000}, ServingFault.TOO_LARGE), ({"text": "x"}, ServingFault.RANK_FAILED)):
        with pytest.raises(ChannelError) as sent:
            here.send(message)
        job.fault = sent.value
        with pytest.raises(ServingError) as caught:
            service.submit(ask([{"tokens": [1]}]))
        assert caught.value.fault is fault
    here.close()
    service.close()


class FakeService:
    """Streams that the test fills."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        # A request waits for it as if its text became tokens.
        self.held: dict[str, threading.Event] = {}

    def submit(self, request: ServingRequest | BuildRequest) -> Stream:
        if (held := self.held.get(request.request_id or "")) is not None:
            assert held.wait(30)
        if self.refusal is not None:
            raise self.refusal
        name = request.request_id or ""
        stream = Stream(name, lambda: self.cancelled.append(name))
        self.streams.append(stream)
        return stream

    def health(self) -> Health:
        return Health(state=State.READY, world_size=3, waiting=1, running=2)

    def metrics(self) -> str:
        return "figures 1.0\n"

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def linked() -> Iterator[tuple[FakeService, Channel, threading.Thread, list[BaseException]]]:
    """A rank 0 over a fake service, and the front end's end of its connection."""
    listener, service, raised = Listener(), FakeService(), []
    here = connect(listener.path)
    there = listener.accept(10)
    assert there is not None

    def run() -> None:
        try:
            FrontEndLink(service, there).run()
        except ChannelError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield service, here, thread, raised
    here.close()
    thread.join(10)
    there.close()
    listener.close()
    assert not thread.is_alive()


Linked = tuple[FakeService, Channel, threading.Thread, list[BaseException]]


def submission(number: int, **request: object) -> dict[str, object]:
    request = {"segments": [{"tokens": [1]}], **request}
    return {"op": "submit", "stream": number, "kind": "generate", "request": request}


def await_streams(service: FakeService, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(service.streams) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_rank_zero_forwards_events_of_many_requests(linked: Linked) -> None:
    service, channel, _, _ = linked
    for number in range(3):
        channel.send(submission(number, request_id=f"r{number}"))
        await_streams(service, number + 1)
    channel.send({"op": "health", "call": 7})
    assert channel.receive() == {"op": "reply", "call": 7, "value": service.health().to_json()}
    assert [stream.request_id for stream in service.streams] == ["r0", "r1", "r2"]
    for number, stream in reversed(list(enumerate(service.streams))):
        stream.put(TokenEvent(index=0, token=number, text="x"))
        found = channel.receive()
        assert found == {
            "op": "event",
            "stream": number,
            "event": TokenEvent(index=0, token=number, text="x").to_json(),
        }
    channel.send({"op": "cancel", "stream": 1})
    channel.send({"op": "cancel", "stream": 99})
    channel.send({"op": "metrics", "call": 8})
    assert channel.receive() == {"op": "reply", "call": 8, "value": "figures 1.0\n"}
    assert service.cancelled == ["r1"]
    for stream in service.streams:
        stream.put(FailedEvent(fault=ServingFault.INTERNAL, message="over"))
    ends = [channel.receive() for _ in range(3)]
    assert sorted(end["stream"] for end in ends if end) == [0, 1, 2]


def test_rank_zero_tells_of_refusals(linked: Linked) -> None:
    service, channel, _, _ = linked
    channel.send(submission(1, colour="red"))
    refused = channel.receive()
    assert refused is not None
    assert refused["event"]["fault"] == "invalid_request"
    assert "colour" in refused["event"]["message"]
    service.refusal = ServingError(ServingFault.QUEUE_FULL, "later")
    channel.send(submission(2))
    assert channel.receive() == {
        "op": "event", "stream": 2, "event": FailedEvent(fault=ServingFault.QUEUE_FULL, message="later").to_json(),
    }  # fmt: skip


def test_nothing_waits_behind_a_request_that_is_taken_in(linked: Linked) -> None:
    """A long text on its way to tokens: health, others, and its own cancellation go past it."""
    service, channel, _, _ = linked
    service.held["long"] = threading.Event()
    try:
        channel.send(submission(1, request_id="long"))
        channel.send({"op": "health", "call": 7})
        channel.send(submission(2, request_id="short"))
        replies: list[object] = []
        receiver = threading.Thread(target=lambda: replies.append(channel.receive()), daemon=True)
        receiver.start()
        receiver.join(10)
        assert replies == [{"op": "reply", "call": 7, "value": service.health().to_json()}]
        await_streams(service, 1)
        assert [stream.request_id for stream in service.streams] == ["short"]
        channel.send({"op": "cancel", "stream": 1})
        channel.send({"op": "metrics", "call": 8})
        channel.receive()
        assert service.cancelled == []
    finally:
        service.held["long"].set()
    await_streams(service, 2)
    deadline = time.monotonic() + 10
    while not service.cancelled and time.monotonic() < deadline:
        time.sleep(0.001)
    assert service.cancelled == ["long"]
    for stream in service.streams:
        stream.put(FailedEvent(fault=ServingFault.CANCELLED, message="over"))


def test_a_rank_ends_after_what_it_is_taking_in() -> None:
    """A thread in a tokenizer when the process ends would abort it."""
    here, there = (Channel(end) for end in socket.socketpair())
    service = FakeService()
    service.held["long"] = threading.Event()
    link = FrontEndLink(service, there)
    here.send(submission(1, request_id="long"))
    here.send({"op": "stop"})
    link.run()
    ending = threading.Thread(target=link.join)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    service.refusal = ServingError(ServingFault.SHUTTING_DOWN, "the service ends")
    service.held["long"].set()
    ending.join(30)
    assert not ending.is_alive()
    last = here.receive()
    assert last is not None
    assert last["event"]["fault"] == "shutting_down"
    here.close()
    there.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_breaks_its_thread_is_told(linked: Linked) -> None:
    service, channel, _, _ = linked
    service.refusal = MemoryError()
    channel.send(submission(1))
    last = channel.receive()
    assert last is not None
    assert last["event"]["fault"] == "internal"
    # What a thread dies of is noted as a warning of the test that runs then: of this one.
    for thread in threading.enumerate():
        if "_answer" in thread.name:
            thread.join(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_cannot_be_sent_has_an_end_all_the_same(linked: Linked) -> None:
    """The front end waits for the last event of every stream, whatever becomes of the one that was meant."""
    service, channel, _, _ = linked
    unfit: tuple[dict[str, object], ...] = ({"ttft_s": float("nan")}, {"long": "x" * MAX_FRAME_BYTES})
    for number, report in enumerate(unfit):
        channel.send(submission(number, request_id=f"r{number}"))
        await_streams(service, number + 1)
        service.streams[-1].put(DoneEvent(tokens=(), text="", tail="", finish_reason="stop", report=report))
        last = channel.receive()
        assert last is not None
        assert (last["stream"], last["event"]["fault"]) == (number, "internal")
    for thread in threading.enumerate():
        if "_answer" in thread.name:
            thread.join(60)


def test_rank_zero_ends_when_told(linked: Linked) -> None:
    _, channel, thread, raised = linked
    channel.send({"op": "stop"})
    thread.join(10)
    assert not thread.is_alive()
    assert raised == []


def test_rank_zero_notices_that_its_front_end_is_gone(linked: Linked) -> None:
    service, channel, thread, raised = linked
    channel.send(submission(1, request_id="open"))
    await_streams(service, 1)
    channel.close()
    thread.join(10)
    assert "gone" in str(raised[0])
    service.streams[0].put(TokenEvent(index=0, token=1, text=""))
    deadline = time.monotonic() + 10
    while not service.cancelled and time.monotonic() < deadline:
        service.streams[0].put(TokenEvent(index=0, token=1, text=""))
        time.sleep(0.02)
    assert service.cancelled == ["open"]
    service.streams[0].put(FailedEvent(fault=ServingFault.CANCELLED, message="over"))
