"""Requests, events and settings as data: what is accepted, what is refused and how; nothing is lost on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trt_redknot.errors import ConfigError, RequestError
from trt_redknot.serving.commands import (
    Admit,
    Advance,
    Build,
    Decode,
    Drop,
    Preload,
    Stop,
    decode_commands,
    encode_commands,
)
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import (
    BuildRequest,
    BuiltEvent,
    DoneEvent,
    Event,
    FailedEvent,
    Health,
    ServingFault,
    ServingRequest,
    State,
    TokenEvent,
    event_from_json,
    is_final,
)

EVENTS: list[Event] = [
    TokenEvent(index=3, token=7, text="\u20ac"),
    BuiltEvent(index=0, artifact_id="ab", tokens=5, built=True, bytes=10, seconds=0.5),
    DoneEvent(tokens=(1, 2), text="ab", tail="b", finish_reason="stop", report={"arm": "reuse"}),
    DoneEvent(tokens=(), text=None, tail="", finish_reason="built", report={}),
    FailedEvent(fault=ServingFault.QUEUE_FULL, message="later"),
]


@pytest.mark.parametrize("event", EVENTS)
def test_events_survive_json(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event.to_json()))) == event
    assert is_final(event) == isinstance(event, DoneEvent | FailedEvent)


@pytest.mark.parametrize(
    "data",
    [
        {}, {"type": "other"}, {"type": "token", "index": 1}, {"type": "failed", "fault": "nonsense", "message": ""},
        {**EVENTS[2].to_json(), "more": 1}, {**EVENTS[2].to_json(), "tokens": "12"},
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        event_from_json(data)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, "either segments, or documents and a question"),
        ({"segments": [{"tokens": [1]}], "question": "x"}, "either segments, or documents and a question"),
        ({"segments": [{"tokens": [1], "text": "a"}]}, "segments.0"),
        ({"segments": [{"tokens": ["1"]}]}, "segments.0.tokens.0"),
        ({"question": "x", "tenant": "../up"}, "tenant"),
        ({"question": "x", "tenant": "a\n"}, "tenant"),
        ({"question": "x", "deadline_s": 0}, "deadline_s"),
        ({"question": "x", "deadline_s": "5"}, "deadline_s"),
        ({"question": "x", "stop": [""]}, "stop.0"),
        ({"question": "x", "stop": ["a"] * 17}, "stop"),
        ({"question": "x", "stop": "end"}, "stop"),
        ({"question": "x", "missing": "perhaps"}, "missing"),
        ({"question": "x", "request_id": ""}, "request_id"),
        ({"question": "x", "colour": 1}, "'colour' is unknown"),
        ({"question": "x", "reuse": {"budget": 2}}, "reuse.budget"),
        ({"question": "x", "stream": 1}, "stream"),
    ],
)
def test_ill_formed_requests_name_what_is_wrong(values: dict[str, object], key: str) -> None:
    with pytest.raises(RequestError) as caught:
        ServingRequest.parse(values)
    assert key in str(caught.value)
    with pytest.raises(RequestError):
        ServingRequest.parse(json.dumps(values).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"question": "x", "question": "y"}', b"[" * 100_000])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    for kind in (ServingRequest, BuildRequest):
        with pytest.raises(RequestError, match="not a JSON object"):
            kind.parse(content)


def test_documents_to_build_have_content() -> None:
    with pytest.raises(RequestError, match="text or tokens"):
        BuildRequest.parse({"documents": [{"artifact": "ab"}]})
    with pytest.raises(RequestError, match="documents"):
        BuildRequest.parse({"documents": []})
    parsed = BuildRequest.parse(b'{"documents": [{"text": "a"}, {"tokens": [1]}], "tenant": "t"}')
    assert [document.text for document in parsed.documents] == ["a", None]


def test_a_request_has_the_defaults_of_a_request_file() -> None:
    parsed = ServingRequest.parse({"documents": [{"text": "a"}], "question": "b"})
    assert parsed.reuse is not None
    assert parsed.max_new_tokens == 16
    assert (parsed.missing, parsed.tenant, parsed.deadline_s, parsed.stop) == (None, None, None, [])
    assert ServingRequest.parse({"question": "b", "reuse": None}).reuse is None


def test_commands_survive_json() -> None:
    request = ServingRequest.parse({"segments": [{"artifact": "ab", "edits": {"3": 4}}, {"tokens": [1, 2]}]})
    content = {name: getattr(request, name) for name in ("segments", "max_new_tokens", "reuse", "sampling")}
    from trt_redknot.request.file import RequestFile

    commands = [
        Preload(job=1, tenant="t", artifact_ids=("a", "b")),
        Admit(job=1, tenant="t", request=RequestFile(**content), left_s=2.5),
        Build(job=2, tenant="t", tokens=(1, 2), rebuild=True),
        Advance(job=1, steps=4),
        Decode(jobs=(1, 2)),
        Drop(job=1),
        Stop(),
    ]
    assert decode_commands(encode_commands(commands)) == commands


def test_settings_from_strings() -> None:
    config = ServingConfig.of(
        {
            "engine": "e",
            "store": "s",
            "world_size": "2",
            "cache_tokens": "",
            "default_deadline_s": "1.5",
            "verify": "false",
        }
    )
    assert (config.world_size, config.cache_tokens, config.default_deadline_s, config.verify) == (2, None, 1.5, False)
    with pytest.raises(ConfigError) as caught:
        ServingConfig.of({"engine": "e", "max_batch": "0", "world_size": "two", "nmespace": "x"}, "config.pbtxt")
    for part in ("'store' is missing", "'max_batch'", "'world_size'", "'nmespace' is unknown", "config.pbtxt"):
        assert part in str(caught.value)


def test_health_as_json() -> None:
    health = Health(state=State.READY, world_size=2, waiting=1, running=3)
    assert health.to_json() == {
        "state": "ready", "world_size": 2, "waiting": 1, "running": 3, "detail": None, "ready": True,
    }  # fmt: skip
    assert not Health(state=State.UNHEALTHY, world_size=1, waiting=0, running=0, detail="x").ready
