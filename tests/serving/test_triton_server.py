"""A real Triton server with the model of triton/model_repository: what its clients see."""

from __future__ import annotations

import http.client
import json
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving.support import Bench, ask, ids
from tests.support.triton import (
    TritonServer,
    alive,
    held_leases,
    require_triton,
    resident_bytes,
    triton_server,
)
from trt_redknot.cli.command import INTERRUPTED
from trt_redknot.leftovers import SHARED_MEMORY, TRITON_REGIONS
from trt_redknot.serving.bench.command import bench as bench_command
from trt_redknot.serving.messages import DoneEvent, Event, ServingError, ServingFault, ServingRequest, TokenEvent
from trt_redknot.serving.triton_client import failure_of
from trt_redknot.serving.triton_launch import serve
from trt_redknot.serving.triton_probe import probe

CONCURRENCY = 8
MIXED = 200
# Growth of a process over 1,000 requests that is called a leak. Allocators settle during the requests before.
SETTLE, MANY, LEAK_BYTES = 100, 1000, 24 << 20


@pytest.fixture(scope="module")
def server(engine_dir: Path, bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    require_triton()
    folder = tmp_path_factory.mktemp("triton")
    log = folder / "service.jsonl"
    options = ("--set", "cache_tokens=600", "--set", "max_batch=8", "--set", f"log={log}")
    with triton_server(folder, engine_dir, bench.store.root, *options) as started:
        yield started


@pytest.fixture(autouse=True)
def shown_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the server said during a test is shown where the test fails."""
    if "server" not in request.fixturenames:
        yield
        return
    server: TritonServer = request.getfixturevalue("server")
    before = server.log.stat().st_size
    yield
    print(server.log.read_bytes()[before:].decode(errors="replace"))


def as_json(request: ServingRequest) -> dict[str, Any]:
    return request.model_dump(mode="json", exclude_unset=True)


def split(events: list[Event]) -> tuple[list[int], DoneEvent]:
    """Streamed tokens, and the end."""
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert [event.index for event in tokens] == list(range(len(tokens)))
    end = events[-1]
    assert isinstance(end, DoneEvent)
    assert "".join(event.text for event in tokens) + end.tail == (end.text or "")
    return [event.token for event in tokens], end


def prompt(bench: Bench) -> list[dict[str, Any]]:
    chosen = random.sample(range(len(bench.documents)), 2)
    return [*({"artifact": bench.artifact_ids[index]} for index in chosen), {"tokens": ids(9)}]


def test_ready_and_healthy(server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert server.client.ready()
    health = server.client.whole({"action": "health"})
    assert (health["state"], health["world_size"]) == ("ready", 1)
    probe.main(["--url", f"http://127.0.0.1:{server.http}"], standalone_mode=False)
    assert "healthy: 1 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "recompute"])
def test_both_arms_answer_like_the_engine(server: TritonServer, bench: Bench, reuse: bool) -> None:
    request = ask(prompt(bench), reuse=reuse)
    expected = bench.alone(request)
    tokens, end = split(list(server.client.events(as_json(request))))
    whole = server.client.whole(as_json(request))
    assert tokens == list(end.tokens) == whole["tokens"] == list(expected.tokens)
    assert end.finish_reason == whole["finish_reason"] == expected.finish_reason
    for report in (end.report, whole["report"]):
        assert report["arm"] == expected.report.arm == ("reuse" if reuse else "recompute")
        assert report["fallback_reason"] is None
        assert report["rows"]["omitted"] == expected.report.rows.omitted
        assert report["ledgers"]
        assert report["timings"]["ttft_s"] > 0


def test_tokens_come_while_the_answer_grows(server: TritonServer) -> None:
    request = {"segments": [{"tokens": ids(5)}], "max_new_tokens": 60, "stop_tokens": [], "reuse": None}
    events = server.client.events(request)
    first = next(events)
    assert isinstance(first, TokenEvent)
    # The service is still at it.
    assert running(server) == 1
    assert len(split([first, *events])[0]) == 60


def test_documents_are_built_and_then_reused(server: TritonServer) -> None:
    text = "".join(chr(random.randrange(97, 123)) for _ in range(40))
    built = server.client.whole({"action": "build", "documents": [{"text": text}, {"tokens": ids(12)}]})
    documents = built["report"]["documents"]
    assert [(each["tokens"], each["built"]) for each in documents] == [(40, True), (12, True)]
    again = server.client.whole({"action": "build", "documents": [{"text": text}]})
    assert not again["report"]["documents"][0]["built"]
    answer = server.client.whole({"documents": [{"text": text}], "question": "why?", "max_new_tokens": 2})
    assert answer["report"]["arm"] == "reuse"
    assert answer["report"]["rows"]["total"] == 44


def test_grpc_streams_and_says_which_response_is_the_last(server: TritonServer, bench: Bench) -> None:
    from tritonclient.grpc import InferenceServerClient

    request = ask(prompt(bench), 5)
    results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = InferenceServerClient(f"127.0.0.1:{server.grpc}")
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    client.async_stream_infer("redknot", [tensor(as_json(request))], request_id="by-grpc")
    tokens: list[int] = []
    while True:
        result, error = results.get(timeout=60)
        assert error is None
        tokens += result.as_numpy("tokens").tolist()
        if result.as_numpy("final")[0]:
            break
    client.stop_stream()
    client.close()
    report = json.loads(result.as_numpy("report")[0])
    assert tokens == report["tokens"] == list(bench.alone(request).tokens)
    assert report["report"]["request_id"] == "by-grpc"


def tensor(values: dict[str, Any]) -> Any:
    from tritonclient.grpc import InferInput

    given = InferInput("request", [1], "BYTES")
    given.set_data_from_numpy(np.array([json.dumps(values).encode()], dtype=np.object_))
    return given


BAD = {
    "no JSON": (b"{", "not a JSON object"),
    "a list": (b"[]", "not a JSON object"),
    "no text": (b"\xff\xfe", "not a JSON object"),
    "a key twice": (b'{"action": "health", "action": "health"}', "twice"),
    "another action": ({"action": "sing"}, "expected generate or build or health"),
    "an unknown key": ({"segments": [{"tokens": [1]}], "colour": "red"}, "key 'colour' is unknown"),
    "no prompt": ({}, "either segments, or documents and a question"),
    "an empty segment": ({"segments": [{"tokens": []}]}, "empty"),
    "another type": ({"segments": [{"tokens": "abc"}]}, "tokens"),
    "a token outside": ({"segments": [{"tokens": [100_000]}]}, "outside the vocabulary"),
    "a negative token": ({"segments": [{"tokens": [-1]}]}, "outside the vocabulary"),
    "no tokens wanted": ({"segments": [{"tokens": [1]}], "max_new_tokens": 0}, "max_new_tokens"),
    "a bad policy": ({"segments": [{"tokens": [1]}], "reuse": {"budget": 7}}, "budget"),
    "a bad tenant": ({"segments": [{"tokens": [1]}], "tenant": "../x"}, "tenant"),
    "a bad deadline": ({"segments": [{"tokens": [1]}], "deadline_s": -1}, "deadline_s"),
    "nothing to build": ({"action": "build", "documents": []}, "documents"),
    "more for health": ({"action": "health", "tenant": "x"}, "no other keys"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_get_a_clear_error_and_the_server_lives(server: TritonServer, name: str) -> None:
    content, message = BAD[name]
    text = content.decode("latin-1") if isinstance(content, bytes) else json.dumps(content)
    status, body = server.post("/v2/models/redknot/generate_stream", {"request": text})
    assert status == 400
    error = json.loads(body.removeprefix(b"data:"))["error"]
    assert error.startswith("invalid_request: ")
    assert message in error
    assert "Traceback" not in error
    assert ".py" not in error
    assert server.client.whole({"action": "health"})["ready"]


def test_faults_have_their_names(server: TritonServer) -> None:
    for request, fault in (
        ({"segments": [{"tokens": ids(500)}], "max_new_tokens": 200}, ServingFault.TOO_LARGE),
        ({"segments": [{"artifact": "0" * 32}], "missing": "refuse"}, ServingFault.MISSING_DOCUMENT),
        ({"segments": [{"tokens": ids(9)}], "max_new_tokens": 300, "stop_tokens": [], "deadline_s": 0.05},
         ServingFault.DEADLINE),
    ):  # fmt: skip
        with pytest.raises(ServingError) as caught:
            server.client.whole(request)
        assert caught.value.fault is fault, caught.value


def test_what_is_no_model_request_is_refused_by_triton(server: TritonServer) -> None:
    """Triton answers by itself, as docs/serving.md says: 400 or 500, an error that begins with none of our faults."""
    wrong: tuple[Any, ...] = (5, 1.5, True, None, {"documents": []}, [1], [], ["{}", "{}"])
    bodies = [b"", b"{}", b"[]", b"\x00" * 100, *(json.dumps({"request": each}).encode() for each in wrong)]
    for content in bodies:
        for path in ("generate", "generate_stream"):
            status, body = server.post(f"/v2/models/redknot/{path}", content)
            assert status in (400, 500), content
            error = json.loads(body.removeprefix(b"data:"))["error"]
            assert failure_of(error).fault is ServingFault.INTERNAL, content
            assert "Traceback" not in error
    assert server.client.whole({"action": "health"})["ready"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(server: TritonServer) -> int:
    health = server.client.whole({"action": "health"})
    return int(health["running"]) + int(health["waiting"])


def test_a_client_that_goes_away_cancels_its_request(server: TritonServer) -> None:
    long = {"segments": [{"tokens": ids(9)}], "max_new_tokens": 300, "stop_tokens": [], "reuse": None}
    events = server.client.events(long)
    next(events)
    assert running(server) == 1
    events.close()  # type: ignore[attr-defined]
    until(lambda: running(server) == 0)

    from tritonclient.grpc import InferenceServerClient

    first = threading.Event()
    client = InferenceServerClient(f"127.0.0.1:{server.grpc}")
    client.start_stream(callback=lambda result, error: first.set())
    client.async_stream_infer("redknot", [tensor(long)])
    assert first.wait(60)
    client.stop_stream(cancel_requests=True)
    client.close()
    until(lambda: running(server) == 0)


def test_mixed_requests_at_once_answer_like_the_engine(server: TritonServer, bench: Bench) -> None:
    draw = random.Random(random.randrange(2**31))
    kinds = [
        ask([{"artifact": bench.artifact_ids[index % 3]}, {"tokens": ids(4)}], 2, reuse=draw.random() < 0.5)
        for index in range(12)
    ]
    expected = [list(bench.alone(kind).tokens) for kind in kinds]

    def go(number: int) -> str:
        choice = draw.randrange(10)
        client, kind = server.client, number % len(kinds)
        if choice == 0:
            with pytest.raises(ServingError):
                client.whole({"segments": [{"tokens": [-5]}]})
            return "bad"
        if choice == 1:
            events = client.events({**as_json(kinds[kind]), "max_new_tokens": 100})
            next(events)
            events.close()  # type: ignore[attr-defined]
            return "cancelled"
        if choice < 6:
            assert client.whole(as_json(kinds[kind]))["tokens"] == expected[kind]
            return "whole"
        assert split(list(client.events(as_json(kinds[kind]))))[0] == expected[kind]
        return "streamed"

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        done = list(pool.map(go, range(MIXED), timeout=240))
    assert set(done) == {"bad", "cancelled", "whole", "streamed"}
    until(lambda: running(server) == 0)
    assert not held_leases(server.processes())


def test_the_bench_measures_a_server(server: TritonServer, engine_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    options = ["--random", "2x20", "--question-tokens", "3", "--output-tokens", "2", "--concurrency", "2", "--rounds",
               "1", "--requests", "3", "--warm-up", "0"]  # fmt: skip
    url = f"http://127.0.0.1:{server.http}"
    bench_command.main(["--engine", str(engine_dir), "--url", url, "--log", str(log), *options], standalone_mode=False)
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()][1:]
    assert [(line["arm"], line["arm_run"], line["tokens"]) for line in lines] == [
        *[("reuse", "reuse", 2)] * 3, *[("recompute", "recompute", 2)] * 3,
    ]  # fmt: skip


def test_metrics_and_logs_name_what_happened(server: TritonServer) -> None:
    name = f"watched-{random.randrange(2**31)}"
    server.client.whole({"segments": [{"tokens": ids(5)}], "max_new_tokens": 1, "request_id": name})

    def counted() -> bool:
        lines = server.client.metrics(server.metrics).splitlines()
        return any(line.startswith("redknot_") and "completed" in line and float(line.split()[-1]) > 0
                   for line in lines)  # fmt: skip

    until(counted)
    log = server.log.parent / "service.jsonl"
    until(lambda: name in log.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if name in line]
    assert all(line["request_id"] == name for line in lines)


def test_a_thousand_requests_leave_nothing(server: TritonServer, bench: Bench) -> None:
    artifact = {"artifact": bench.artifact_ids[0]}
    kinds: list[tuple[dict[str, Any], ServingFault | None]] = [
        (as_json(ask([artifact, {"tokens": ids(2)}], 1)), None),
        ({"segments": [{"tokens": [-1]}]}, ServingFault.INVALID_REQUEST),
        ({"documents": [artifact, {"artifact": "0" * 32}], "missing": "refuse"}, ServingFault.MISSING_DOCUMENT),
        ({"documents": [artifact], "question": ids(2), "deadline_s": 1e-6}, ServingFault.DEADLINE),
    ]

    def go(number: int) -> bool:
        request, fault = kinds[number % len(kinds)]
        try:
            return len(server.client.whole(request)["tokens"]) == 1 and fault is None
        except ServingError as error:
            return error.fault is fault

    def many(count: int) -> None:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            assert all(pool.map(go, range(count)))

    many(SETTLE)
    until(lambda: running(server) == 0)
    processes = server.processes()
    before = {pid: (resident_bytes(pid), open_files(pid)) for pid in processes}
    many(MANY)
    until(lambda: running(server) == 0)
    assert server.processes() == processes
    for pid, (bytes_before, files_before) in before.items():
        assert resident_bytes(pid) - bytes_before < LEAK_BYTES, processes[pid]
        assert open_files(pid) <= files_before + 2 * CONCURRENCY, processes[pid]
    assert not held_leases(processes)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_bad_engine_ends_the_start_with_one_line(tmp_path: Path) -> None:
    from trt_redknot.errors import EngineError

    with pytest.raises(EngineError, match=r"engine\.json"):
        serve.main(["--engine", str(tmp_path), "--store", str(tmp_path)], standalone_mode=False)


def test_ctrl_c_ends_the_server_at_once(engine_dir: Path, bench: Bench, tmp_path: Path) -> None:
    """With a request that would take longer, and a client that keeps its connection: Triton itself would wait."""
    require_triton()
    with triton_server(tmp_path, engine_dir, bench.store.root, "--exit-timeout-s", "600") as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.http, timeout=60.0)
        kept.request("GET", "/v2/health/ready")
        assert kept.getresponse().read() == b""
        long = {"segments": [{"tokens": ids(9)}], "max_new_tokens": 390, "stop_tokens": [], "reuse": None}
        events = server.client.events(long)
        assert isinstance(next(events), TokenEvent)
        processes = server.processes()
        server.launcher.send_signal(signal.SIGINT)
        with pytest.raises(ServingError) as caught:
            list(events)
        assert caught.value.fault is ServingFault.SHUTTING_DOWN
        assert server.launcher.wait(60) == INTERRUPTED
        assert not {pid: line for pid, line in processes.items() if alive(pid)}
        kept.close()
    assert not list(SHARED_MEMORY.glob(f"{TRITON_REGIONS}.*.{server.launcher.pid}.*"))
