"""What a bench asks: a service of this process, or a Triton server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from trt_redknot.serving.frontend import Serving
from trt_redknot.serving.messages import (
    BuildRequest,
    BuiltEvent,
    Event,
    FailedEvent,
    ServingError,
    ServingRequest,
)
from trt_redknot.serving.triton_client import TritonClient


class Target(Protocol):
    """Any thread may ask."""

    def events(self, request: Mapping[str, object]) -> Iterator[Event]:
        """The events of a request up to a DoneEvent. Raises ServingError where it fails."""
        ...

    def build(self, request: Mapping[str, object]) -> list[str]:
        """Ids of the documents that a build request names, once they are in the store."""
        ...


class ServiceTarget:
    """A service as an object."""

    def __init__(self, service: Serving) -> None:
        self._service = service

    def events(self, request: Mapping[str, object]) -> Iterator[Event]:
        stream = self._service.submit(ServingRequest.parse(request))
        with contextlib.ExitStack() as stack:
            stack.callback(stream.cancel)
            for event in stream:
                if isinstance(event, FailedEvent):
                    raise ServingError(event.fault, event.message)
                yield event

    def build(self, request: Mapping[str, object]) -> list[str]:
        stream = self._service.submit(BuildRequest.parse(request))
        built: list[str] = []
        for event in stream:
            if isinstance(event, FailedEvent):
                raise ServingError(event.fault, event.message)
            if isinstance(event, BuiltEvent):
                built.append(event.artifact_id)
        return built


class TritonTarget:
    """A Triton server by its address."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client

    def events(self, request: Mapping[str, object]) -> Iterator[Event]:
        return self._client.events(request)

    def build(self, request: Mapping[str, object]) -> list[str]:
        report: dict[str, Any] = self._client.whole({**request, "action": "build"})
        return [str(document["artifact_id"]) for document in report["report"]["documents"]]
