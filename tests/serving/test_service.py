"""A service against the engine that answers alone."""

from __future__ import annotations

from collections.abc import Callable

from tests.serving.support import Bench, ask, ids
from trt_redknot.serving.messages import TokenEvent
from trt_redknot.serving.service import Service


def test_answers_are_those_of_the_engine_alone(bench: Bench, serve: Callable[..., Service]) -> None:
    service = serve()
    requests = []
    for number in range(8):
        first, second = bench.artifact_ids[number % 3], bench.artifact_ids[(number + 1) % 3]
        segments = [{"artifact": first}, {"artifact": second}, {"tokens": ids(5 + number)}]
        requests.append(ask(segments, 3 + number, reuse=number % 2 == 0))
    streams = [service.submit(request) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        events = list(stream)
        wanted = bench.alone(request)
        tokens = [event.token for event in events if isinstance(event, TokenEvent)]
        assert tokens == wanted.tokens
        done = events[-1]
        assert list(done.tokens) == tokens
        assert done.report["arm"] == wanted.report.arm
        assert done.report["rows"] == wanted.report.to_json()["rows"]
        assert done.text == "".join(event.text for event in events[:-1]) + done.tail
