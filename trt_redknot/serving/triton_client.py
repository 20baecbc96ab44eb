"""A client of the Triton model over plain HTTP: the standard library is enough, because Triton streams JSON lines."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from trt_redknot.errors import LaunchError, RequestError
from trt_redknot.serving.messages import Event, ServingError, ServingFault, TokenEvent, event_from_json
from trt_redknot.serving.triton_repository import MODEL

# A line holds one response; the longest carries a report.
_MAX_LINE_BYTES = 64 << 20


class TritonClient:
    """Sends requests of docs/requests.md to a Triton server. Every call has a connection of its own; threads may share.

    Args:
        url: ``http://host:port``.
        timeout_s: seconds without a byte from the server after which a call fails.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        address = _address(url)
        if address is None:
            raise RequestError("the server's address is ill-formed", expected="http://host:port", found=url)
        self._address = address
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """Whether Triton says that the model is ready. It says so even after the model's process has died."""
        with self._call("GET", f"/v2/models/{MODEL}/ready") as call:
            return call.response.status == http.client.OK

    def whole(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The report of a request that is answered in one response.

        Raises:
            ServingError: the request failed.
            LaunchError: the server is not there.
        """
        body = {"request": json.dumps({**request, **({} if "action" in request else {"stream": False})})}
        with self._call("POST", f"/v2/models/{MODEL}/generate", body) as call:
            return _report(_checked(call.line_of_all()))

    def events(self, request: Mapping[str, object]) -> Iterator[Event]:
        """The events of a streamed request. Closing the iterator cancels the request.

        Raises:
            ServingError: the request failed.
            LaunchError: the server is not there.
        """
        body = {"request": json.dumps(request)}
        index = 0
        with self._call("POST", f"/v2/models/{MODEL}/generate_stream", body) as call:
            for line in call.lines():
                values = _checked(line)
                if values["final"]:
                    yield event_from_json(_report(values))
                    return
                for token in _listed(values["tokens"]):
                    yield TokenEvent(index=index, token=token, text=values["text"])
                    index += 1
        raise ServingError(ServingFault.INTERNAL, "the stream ended without its last response")

    def metrics(self, port: int) -> str:
        """Text of the metrics endpoint, which has a port of its own."""
        with self._call("GET", "/metrics", port=port) as call:
            return call.response.read().decode()

    def _call(self, method: str, path: str, body: object | None = None, port: int | None = None) -> _Call:
        host, own_port = self._address
        connection = http.client.HTTPConnection(host, port or own_port, timeout=self._timeout_s)
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, body=content, headers={"Content-Type": "application/json"})
            return _Call(connection, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise LaunchError(
                f"the server does not answer: {str(error) or type(error).__name__}", path=f"http://{host}:{own_port}",
                remedy="Is it running, and is this its HTTP port?",
            ) from error  # fmt: skip


def _address(url: str) -> tuple[str, int] | None:
    """Host and port of an URL; None where it is none, or no connection could be made with its host or port."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            return None
        parts.hostname.encode("idna")
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 8000)
    except (ValueError, http.client.InvalidURL):
        return None
    return connection.host, connection.port


class _Call:
    """A connection with a response on it; leaving the context closes it, which cancels what it asked for."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self.response = response

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.response.close()
        self._connection.close()

    def lines(self) -> Iterator[bytes]:
        """The content of each server-sent event; the whole body where it is none."""
        try:
            while line := self.response.readline(_MAX_LINE_BYTES):
                if content := line.strip():
                    yield content.removeprefix(b"data:").strip()
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(
                ServingFault.INTERNAL, f"the connection broke: {error or type(error).__name__}"
            ) from error

    def line_of_all(self) -> bytes:
        return b"".join(self.lines())


def _checked(line: bytes) -> dict[str, Any]:
    """A response as JSON. Raises ServingError where it tells of a failure, or is none."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ServingError(ServingFault.INTERNAL, f"the server sent no JSON: {line[:200]!r}") from error
    if not isinstance(values, dict):
        raise ServingError(ServingFault.INTERNAL, f"the server sent {line[:200]!r}")
    if "error" in values:
        raise failure_of(str(values["error"]))
    return values


def failure_of(message: str) -> ServingError:
    """What an error of the model says: its fault leads the message. Triton's own errors are internal."""
    fault, colon, rest = message.partition(": ")
    if colon and fault in set(ServingFault):
        return ServingError(ServingFault(fault), rest)
    return ServingError(ServingFault.INTERNAL, message)


def _report(values: dict[str, Any]) -> dict[str, Any]:
    report = json.loads(values["report"])
    assert isinstance(report, dict)
    return report


def _listed(value: object) -> list[int]:
    """Triton writes a list of one as its element."""
    return [int(item) for item in value] if isinstance(value, list) else [int(str(value))]
