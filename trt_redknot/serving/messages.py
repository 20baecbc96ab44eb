"""What goes into a service and what comes out of it, as data with a JSON form. docs/serving.md describes the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from trt_redknot.artifacts.certificate import NAMESPACE_PATTERN
from trt_redknot.config.documents import parse_json_object, validated_json
from trt_redknot.errors import ConfigError, RedKnotError, RequestError
from trt_redknot.request.file import RequestFile, SegmentFile, StrictModel
from trt_redknot.serving.config import Missing

_MAX_STOPS = 16
_MAX_STOP_LENGTH = 256
_MAX_DOCUMENTS = 4096

RequestId = Annotated[str, Field(min_length=1, max_length=256)]
Tenant = Annotated[str, Field(pattern=NAMESPACE_PATTERN)]
Deadline = Annotated[float, Field(gt=0, allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_LENGTH)]


class ServingFault(StrEnum):
    """Why a request failed. The list is closed.

    INVALID_REQUEST: it could never be answered. TOO_LARGE: nor could one of its size, by this service. QUEUE_FULL:
    later perhaps. DEADLINE, CANCELLED: its time, or its client's interest, ended. MISSING_DOCUMENT: nobody has the
    tokens of a document, or it is not in the store and the request refuses to go on without. RANK_FAILED: a rank died
    or hangs. SHUTTING_DOWN: the service ends. INTERNAL: anything else; the service's log says what.
    """

    INVALID_REQUEST = "invalid_request"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    TOO_LARGE = "too_large"
    MISSING_DOCUMENT = "missing_document"
    RANK_FAILED = "rank_failed"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class ServingRequest(RequestFile):
    """A request file with its envelope. Instead of `segments` it may have `documents` and a `question`.

    Attributes:
        documents: the prompt's documents, in order; one whose tokens are known and whose artifact is in the tenant's
            namespace is reused.
        question: what follows them, as text or as token ids.
        tenant: names the namespace of the store; left out: the service's own.
        deadline_s: seconds from submission to the last token; left out: the service's own limit.
        stop: texts before which the answer ends.
        missing: left out: the service's own rule, see :class:`~trt_redknot.serving.config.ServingConfig`.
        stream: whether the client wants tokens as they come; the service streams to its caller in any case.
    """

    segments: list[SegmentFile] = Field(default_factory=list)
    documents: list[SegmentFile] = Field(default_factory=list, max_length=_MAX_DOCUMENTS)
    question: str | list[int] | None = None
    tenant: Tenant | None = None
    deadline_s: Deadline | None = None
    stop: list[StopText] = Field(default_factory=list, max_length=_MAX_STOPS)
    missing: Missing | None = None
    stream: bool = True
    request_id: RequestId | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if bool(self.segments) == bool(self.documents or self.question is not None):
            raise ValueError("a request has either segments, or documents and a question")
        return self

    @classmethod
    def parse(cls, content: bytes | Mapping[str, object]) -> ServingRequest:
        """From JSON text or its values. Raises RequestError naming every key at fault."""
        return _parse(cls, content)


class BuildRequest(StrictModel):
    """Documents to be put into a tenant's namespace, each as text or as token ids."""

    documents: list[SegmentFile] = Field(min_length=1, max_length=_MAX_DOCUMENTS)
    tenant: Tenant | None = None
    rebuild: bool = False
    deadline_s: Deadline | None = None
    request_id: RequestId | None = None

    @model_validator(mode="after")
    def _with_content(self) -> Self:
        if any(document.artifact is not None for document in self.documents):
            raise ValueError("a document to be built is given as text or tokens, not as an artifact")
        return self

    @classmethod
    def parse(cls, content: bytes | Mapping[str, object]) -> BuildRequest:
        """From JSON text or its values. Raises RequestError naming every key at fault."""
        return _parse(cls, content)


Message = TypeVar("Message", ServingRequest, BuildRequest)


def _parse(kind: type[Message], content: bytes | Mapping[str, object]) -> Message:
    try:
        values = parse_json_object(content) if isinstance(content, bytes) else content
        return validated_json(kind, values, Path("the request"))
    except ConfigError as error:
        raise RequestError(error.problem, path=error.path, remedy=error.remedy) from error
    except ValueError as error:
        raise RequestError("the request is not a JSON object", found=error) from error


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """A generated token: its place in the answer, its id, and the text that became certain with it (maybe none)."""

    index: int
    token: int
    text: str

    def to_json(self) -> dict[str, object]:
        return {"type": "token", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class BuiltEvent:
    """A document is in the store. `built` is False where it was there already; `bytes` are those of its files."""

    index: int
    artifact_id: str
    tokens: int
    built: bool
    bytes: int
    seconds: float

    def to_json(self) -> dict[str, object]:
        return {"type": "built", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class DoneEvent:
    """The end of what succeeded.

    Attributes:
        tokens: all generated ids; those that make up a stop text too.
        text: the answer without its stop text; None where the engine has no tokenizer.
        tail: the part of `text` that no token event carried.
        finish_reason: ``stop`` after a stop token or text, ``length``, or ``built`` for documents.
        report: of the answer, with the service's own timings under ``serving``.
    """

    tokens: tuple[int, ...]
    text: str | None
    tail: str
    finish_reason: Literal["stop", "length", "built"]
    report: dict[str, object]

    def to_json(self) -> dict[str, object]:
        return {"type": "done", **asdict(self), "tokens": list(self.tokens)}


@dataclass(frozen=True, kw_only=True)
class FailedEvent:
    """The end of what failed: why, and the same for people."""

    fault: ServingFault
    message: str

    def to_json(self) -> dict[str, object]:
        return {"type": "failed", "fault": self.fault.value, "message": self.message}


Event = TokenEvent | BuiltEvent | DoneEvent | FailedEvent
_EVENTS: dict[str, type[Event]] = {"token": TokenEvent, "built": BuiltEvent, "done": DoneEvent, "failed": FailedEvent}


def is_final(event: Event) -> bool:
    """Whether no event follows this one."""
    return isinstance(event, DoneEvent | FailedEvent)


def event_from_json(data: Mapping[str, object]) -> Event:
    """What `to_json` made. ValueError for anything else."""
    kind = _EVENTS.get(str(data.get("type")))
    names = set() if kind is None else {field.name for field in fields(kind)}
    values = {name: value for name, value in data.items() if name != "type"}
    if kind is None or set(values) != names:
        raise ValueError(f"not an event: {str(data)[:80]}")
    if "fault" in values:
        values["fault"] = ServingFault(str(values["fault"]))
    if kind is DoneEvent:
        tokens = values["tokens"]
        if not isinstance(tokens, list):
            raise ValueError("the tokens of an event are not a list")
        values["tokens"] = tuple(tokens)
    return kind(**values)  # type: ignore[arg-type]


class ServingError(RedKnotError):
    """A request failed, as an exception for callers who want the whole answer or none."""

    def __init__(self, fault: ServingFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class State(StrEnum):
    """Of a service. UNHEALTHY: it answers nothing any more; its process should be ended and started again."""

    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class Health:
    """Of a service, now. `waiting` requests are queued, `running` ones hold cache rows; `detail` says what is wrong."""

    state: State
    world_size: int
    waiting: int
    running: int
    detail: str | None = None

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "state": self.state.value, "ready": self.ready}
