"""What a front end needs of a service, whether it runs in this process or behind a socket."""

from __future__ import annotations

from typing import Protocol

from trt_redknot.serving.messages import BuildRequest, Health, ServingRequest
from trt_redknot.serving.stream import Stream


class Serving(Protocol):
    """A service as its clients see it. Any thread may call."""

    def submit(self, request: ServingRequest | BuildRequest) -> Stream:
        """Start a request.

        Raises:
            ServingError: it is refused at once.
        """
        ...

    def health(self) -> Health: ...

    def metrics(self) -> str:
        """Everything counted, in Prometheus' text format."""
        ...

    def close(self) -> None: ...
