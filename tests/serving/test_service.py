"""A service with its thread: answers, refusals that leave it alive, back-pressure, its end."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.support import Bench, ask, ids, make_bench, open_leases
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.tokenizer import EngineTokenizer
from trt_redknot.errors import ConfigError, EngineError, StoreError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import (
    BuildRequest,
    DoneEvent,
    FailedEvent,
    ServingError,
    ServingFault,
    ServingRequest,
    State,
    TokenEvent,
)
from trt_redknot.serving.service import Service

Serve = Callable[..., Service]


def samples(service: Service) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(service.metrics())
        for sample in family.samples
    }


def test_answers_are_those_of_the_engine_alone(bench: Bench, serve: Serve) -> None:
    """Both arms, several threads, and what is counted about it."""
    service = serve()
    requests = []
    for number in range(6):
        first, second = bench.artifact_ids[number % 3], bench.artifact_ids[(number + 1) % 3]
        segments = [{"artifact": first}, {"artifact": second}, {"tokens": ids(5 + number)}]
        requests.append(ask(segments, 3 + number, reuse=number % 2 == 0, request_id=f"number {number}"))
    answers: dict[int, list[object]] = {}
    rows: Counter[tuple[str, str]] = Counter()
    experts: Counter[int] = Counter()
    late = 0.0

    def client(number: int) -> None:
        answers[number] = list(service.submit(requests[number]))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, request in enumerate(requests):
        events = answers[number]
        wanted = bench.alone(request)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        assert [event.token for event in tokens] == wanted.tokens
        assert [event.index for event in tokens] == list(range(len(tokens)))
        done = events[-1]
        assert isinstance(done, DoneEvent)
        assert list(done.tokens) == wanted.tokens
        assert done.report["arm"] == wanted.report.arm == ("recompute" if number % 2 else "reuse")
        assert done.report["rows"] == wanted.report.to_json()["rows"]
        for row_class in ("protected", "active", "omitted"):
            rows[wanted.report.arm, row_class] += getattr(wanted.report.rows, row_class)
        experts.update(dict(enumerate(wanted.report.k_histogram)))
        timings = done.report["timings"]
        assert isinstance(timings, dict)
        late += timings["late_s"]
        assert done.report["request_id"] == f"number {number}"
        assert done.text == "".join(event.text for event in tokens) + done.tail
        times = done.report["serving"]
        assert isinstance(times, dict)
        assert all(times[name] >= 0 for name in ("queue_s", "ready_s", "prefill_s", "ttft_s", "tpot_s", "total_s"))
        json.dumps(done.to_json())
    counted = samples(service)
    for kind, arm in (("reuse", "reuse"), ("recompute", "recompute")):
        assert counted["redknot_requests_total", kind, "completed"] == 3
        assert counted["redknot_answers_total", arm] == 3
        assert counted["redknot_ttft_seconds_count", arm] == counted["redknot_tpot_seconds_count", arm] == 3
    assert {labels: counted["redknot_rows_total", *labels] for labels in rows} == rows
    assert rows["reuse", "omitted"] > 0
    assert {k: counted["redknot_expert_rows_total", str(k)] for k in experts if k} == {
        k: experts[k] for k in experts if k
    }
    assert experts.total() > 0
    assert counted["redknot_prefetch_late_seconds_total",] == pytest.approx(late)
    assert counted["redknot_generated_tokens_total",] == sum(3 + number for number in range(6))
    assert counted["redknot_admitted_total",] == 3
    while (health := service.health()).running:
        time.sleep(0.001)
    assert (health.state, health.waiting, health.running) == (State.READY, 0, 0)
    assert not open_leases()


def test_stop_texts_and_stop_tokens(bench: Bench, serve: Serve) -> None:
    service = serve()
    # Few answers have nothing to stop at: only bytes that are no character, or such bytes up to the last one.
    for _ in range(20):
        tokens = ids(8)
        plain = service.submit(ask([{"tokens": tokens}], 20, reuse=False)).result()
        assert plain.text is not None
        stop = next((letter for letter in plain.text[3:-1] if letter != "\ufffd"), None)
        if stop is not None:
            break
    assert stop is not None
    events = list(service.submit(ask([{"tokens": tokens}], 20, reuse=False, stop=["never this", stop])))
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert done.finish_reason == "stop"
    assert done.text == plain.text[: plain.text.index(stop)]
    assert "".join(event.text for event in events if isinstance(event, TokenEvent)) + done.tail == done.text
    assert done.tokens == plain.tokens[: len(done.tokens)]
    assert len(done.tokens) < 20
    last = plain.tokens[4]
    stopped = service.submit(ask([{"tokens": tokens}], 20, reuse=False, stop_tokens=[last])).result()
    assert stopped.finish_reason == "stop"
    assert list(stopped.tokens) == list(plain.tokens[: plain.tokens.index(last) + 1])
    assert plain.finish_reason == "length"


@pytest.mark.parametrize(
    ("values", "fault", "text"),
    [
        ({"segments": [{"tokens": [257]}]}, ServingFault.INVALID_REQUEST, "outside the vocabulary"),
        ({"segments": [{"tokens": [-1]}]}, ServingFault.INVALID_REQUEST, "outside the vocabulary"),
        ({"segments": [{"tokens": [2**70]}]}, ServingFault.INVALID_REQUEST, "token id"),
        ({"segments": [{"tokens": []}]}, ServingFault.INVALID_REQUEST, "empty"),
        ({"question": ""}, ServingFault.INVALID_REQUEST, "empty"),
        ({"documents": [{"text": ""}], "question": "x"}, ServingFault.INVALID_REQUEST, "empty"),
        ({"documents": [{"tokens": [300]}], "question": "x"}, ServingFault.INVALID_REQUEST, "outside the vocabulary"),
        ({"question": "x", "max_new_tokens": 0}, ServingFault.INVALID_REQUEST, "max_new_tokens"),
        ({"question": "x", "sampling": {"top_p": 2.0}}, ServingFault.INVALID_REQUEST, "top_p"),
        ({"question": "x", "stop_tokens": [999]}, ServingFault.INVALID_REQUEST, "stop_tokens"),
        ({"question": "x", "max_new_tokens": 400}, ServingFault.TOO_LARGE, "at most 400 tokens"),
        ({"question": "x", "max_new_tokens": 10**30}, ServingFault.TOO_LARGE, "at most 400 tokens"),
        ({"question": "x" * 350}, ServingFault.TOO_LARGE, "cache"),
    ],
)
def test_bad_requests_are_refused_at_once(
    serve: Serve, values: dict[str, object], fault: ServingFault, text: str
) -> None:
    service = serve(cache_tokens=300)
    with pytest.raises(ServingError, match=text) as caught:
        service.submit(ServingRequest.parse(values))
    assert caught.value.fault is fault


def test_texts_that_no_request_can_hold_are_refused_before_they_become_tokens(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    tokenizer = EngineTokenizer(service._config.engine)
    # The vocabulary spells a byte with a letter of up to two bytes.
    limit = 400 * tokenizer.longest_token_bytes
    assert tokenizer.longest_token_bytes == 2
    encoded: list[int] = []
    encode = EngineTokenizer.encode

    def counting(self: EngineTokenizer, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(EngineTokenizer, "encode", counting)
    half, euros = "x" * (limit // 2), "\u20ac" * (limit // 3)
    requests: list[ServingRequest | BuildRequest] = [
        ServingRequest.parse({"question": "x" * (limit + 1)}),
        ServingRequest.parse({"question": euros + "\u20ac"}),
        ServingRequest.parse({"documents": [{"text": half}], "question": half + "x"}),
        ServingRequest.parse({"segments": [{"text": half}, {"text": half + "x"}]}),
        BuildRequest.parse({"documents": [{"text": "x"}, {"text": "x" * (limit + 1)}]}),
    ]
    for request in requests:
        with pytest.raises(ServingError, match=f"at most {limit} bytes") as caught:
            service.submit(request)
        assert caught.value.fault is ServingFault.TOO_LARGE
    assert encoded == []
    with pytest.raises(ServingError, match="at most 400 tokens"):
        service.submit(ServingRequest.parse({"question": "x" * limit}))
    assert encoded == [limit]


def test_what_only_the_artifacts_can_tell_is_refused_later(bench: Bench, serve: Serve) -> None:
    """The service answers on after each of them."""
    service = serve()
    edits = {"5000": 1}
    for segments, fault in (
        ([{"artifact": bench.artifact_ids[0], "edits": edits}], ServingFault.INVALID_REQUEST),
        ([{"artifact": "../../etc"}], ServingFault.MISSING_DOCUMENT),
        ([{"artifact": "f" * 32}], ServingFault.MISSING_DOCUMENT),
        ([{"artifact": ""}], ServingFault.MISSING_DOCUMENT),
    ):
        last = list(service.submit(ask([*segments, {"tokens": [1]}])))[-1]
        assert isinstance(last, FailedEvent)
        assert last.fault is fault, last
        assert service.submit(ask([{"tokens": [1, 2]}], 1)).result().tokens
    assert service.health().ready


def test_tenants_do_not_see_each_others_documents(bench: Bench, serve: Serve) -> None:
    service = serve()
    named = ask([{"artifact": bench.artifact_ids[0]}, {"tokens": [1]}], tenant="other")
    with pytest.raises(ServingError) as caught:
        service.submit(named).result()
    assert caught.value.fault is ServingFault.MISSING_DOCUMENT
    given = {"documents": [{"tokens": bench.documents[0]}], "question": [1], "max_new_tokens": 2, "missing": "refuse"}
    with pytest.raises(ServingError) as caught:
        service.submit(ServingRequest.parse({**given, "tenant": "other"})).result()
    assert caught.value.fault is ServingFault.MISSING_DOCUMENT
    assert service.submit(ServingRequest.parse(given)).result().report["arm"] == "reuse"
    built = service.submit(BuildRequest.parse({"documents": [{"tokens": bench.documents[0]}], "tenant": "other"}))
    assert built.result().finish_reason == "built"
    assert service.submit(ServingRequest.parse({**given, "tenant": "other"})).result().report["arm"] == "reuse"


def test_a_full_queue_says_so_with_numbers(serve: Serve) -> None:
    service = serve(max_queue=3, max_batch=1)
    first = service.submit(ask([{"tokens": ids(200)}], 100, reuse=False))
    while service.health().running == 0:
        time.sleep(0.001)
    waiting = [service.submit(ask([{"tokens": [1]}], 1, reuse=False)) for _ in range(3)]
    with pytest.raises(ServingError, match=r"3 requests wait and 1 run, expected fewer than 3") as caught:
        service.submit(ask([{"tokens": [1]}], 1, reuse=False))
    assert caught.value.fault is ServingFault.QUEUE_FULL
    waiting[1].cancel()
    assert isinstance(list(waiting[1])[-1], FailedEvent)
    while service.health().waiting == 3:
        time.sleep(0.001)
    more = service.submit(ask([{"tokens": [1]}], 1, reuse=False))
    first.cancel()
    for stream in (waiting[0], waiting[2], more):
        assert stream.result().tokens
    assert samples(service)["redknot_requests_total", "recompute", "queue_full"] == 1


def test_a_client_that_does_not_read_holds_nobody_up(serve: Serve) -> None:
    service = serve(max_batch=2)
    lazy = service.submit(ask([{"tokens": ids(5)}], 60, reuse=False))
    for _ in range(5):
        assert service.submit(ask([{"tokens": ids(5)}], 3, reuse=False)).result().tokens
    while not lazy.complete:
        time.sleep(0.001)
    assert len(list(lazy)) == 61
    assert lazy.poll(0.0) is None
    lazy.cancel()


def test_closing_ends_what_is_open(serve: Serve) -> None:
    service = serve(max_batch=1)
    streams = [service.submit(ask([{"tokens": ids(100)}], 200, reuse=False)) for _ in range(3)]
    while service.health().running == 0:
        time.sleep(0.001)
    service.close()
    for stream in streams:
        last = list(stream)[-1]
        assert isinstance(last, FailedEvent)
        assert last.fault is ServingFault.SHUTTING_DOWN
    assert service.health().state is State.CLOSED
    with pytest.raises(ServingError) as caught:
        service.submit(ask([{"tokens": [1]}], 1))
    assert caught.value.fault is ServingFault.SHUTTING_DOWN
    service.close()
    assert not open_leases()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_whose_engine_breaks_fails_what_is_open_and_says_why(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()

    def broken(*_: object) -> None:
        raise MemoryError("no memory for rows")

    monkeypatch.setattr("trt_redknot.engine.generate.Generation.decode", broken)
    streams = [service.submit(ask([{"tokens": [1, 2]}], 5, reuse=False)) for _ in range(3)]
    for stream in streams:
        last = list(stream)[-1]
        assert isinstance(last, FailedEvent)
        assert last.fault is ServingFault.INTERNAL
        assert "no memory for rows" in last.message
    health = service.health()
    assert health.state is State.UNHEALTHY
    assert health.detail is not None
    assert "no memory for rows" in health.detail
    with pytest.raises(ServingError, match="no memory for rows"):
        service.submit(ask([{"tokens": [1]}], 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_answer_that_came_before_the_engine_broke_is_counted_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same turn: the first request has its answer, and the admission of the second breaks the engine."""
    service = serve(prefill_steps=1000)
    submitted, admitted = threading.Event(), []
    admit = Engine.admit

    def once(engine: Engine, *args: object, **how: object) -> object:
        assert submitted.wait(60)
        admitted.append(1)
        if len(admitted) == 2:
            raise MemoryError("no memory for rows")
        return admit(engine, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "admit", once)
    first, second = (service.submit(ask([{"tokens": [1, 2]}], 1, reuse=False)) for _ in range(2))
    submitted.set()
    assert first.result().tokens
    with pytest.raises(ServingError, match="no memory for rows"):
        second.result()
    while service.health().state is not State.UNHEALTHY:
        time.sleep(0.001)
    service.close()
    counted = samples(service)
    ended = {outcome: counted["redknot_requests_total", "recompute", outcome] for outcome in ("completed", "internal")}
    assert ended == {"completed": 1, "internal": 1}


def test_a_turn_that_never_ends_is_noticed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(stall_s=0.2)
    go_on = threading.Event()
    monkeypatch.setattr("trt_redknot.engine.generate.Generation.decode", lambda *_: go_on.wait(60) and None)
    last = list(service.submit(ask([{"tokens": [1, 2]}], 5, reuse=False)))[-1]
    assert isinstance(last, FailedEvent)
    assert last.fault is ServingFault.RANK_FAILED
    assert service.health().state is State.UNHEALTHY
    monkeypatch.undo()
    go_on.set()


def test_logs_name_the_request(serve: Serve, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    service = serve(log=str(log))
    service.submit(ask([{"tokens": [1, 2]}], 2, reuse=False, request_id="a\nb", tenant="t")).result()
    with pytest.raises(ServingError):
        service.submit(ask([{"artifact": "0" * 32}], 2)).result()
    service.close()
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    ended = [line for line in lines if line.get("event") == "request"]
    assert [line["outcome"] for line in ended] == ["completed", "missing_document"]
    assert (ended[0]["request_id"], ended[0]["tenant"], ended[0]["arm"], ended[0]["tokens"]) == (
        "a\nb", "t", "recompute", 2,
    )  # fmt: skip
    assert ended[0]["ttft_s"] > 0


def test_an_engine_without_a_tokenizer_serves_tokens(tmp_path: Path) -> None:
    engine = make_bench(tmp_path, seed=random.randrange(2**31), tokenizer=False)
    with Service.open(ServingConfig(engine=engine, store=tmp_path / "store", cache_tokens=100)) as service:
        done = service.submit(ask([{"tokens": [1, 2]}], 3, reuse=False)).result()
        assert len(done.tokens) == 3
        assert done.text is None
        for values in (
            {"question": "text"}, {"documents": [{"text": "a"}], "question": [1]}, {"question": [1], "stop": ["x"]},
        ):  # fmt: skip
            with pytest.raises(ServingError, match="no tokenizer") as caught:
                service.submit(ServingRequest.parse(values))
            assert caught.value.fault is ServingFault.INVALID_REQUEST
        with pytest.raises(ServingError, match="no tokenizer"):
            service.submit(BuildRequest.parse({"documents": [{"text": "a"}]}))


def test_what_cannot_be_served_is_refused_when_it_is_opened(config: ServingConfig, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        Service.open(config.model_copy(update={"engine": tmp_path / "nowhere"}))
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError):
        Service.open(config.model_copy(update={"store": file}))
    with pytest.raises(ConfigError, match="number of ranks"):
        Service.open(config.model_copy(update={"world_size": 2}))
    with pytest.raises(StoreError, match="log"):
        Service.open(config.model_copy(update={"log": str(tmp_path / "no" / "folder")}))
