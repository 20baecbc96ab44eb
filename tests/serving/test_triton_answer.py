"""One Triton request whose client cannot be sent to any more: what nobody can be told is not computed."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from trt_redknot.serving.messages import DoneEvent, FailedEvent, Health, ServingFault, State, TokenEvent
from trt_redknot.serving.stream import Stream
from trt_redknot.serving.triton import TritonFrontEnd


class Sender:
    """Triton's response sender; from response `fails` on it raises, up to `recovers`."""

    def __init__(self, fails: int, recovers: int | None = None) -> None:
        self._fails = fails
        self._recovers = recovers
        self.sent = 0
        self.last: object = None

    def is_cancelled(self) -> bool:
        return False

    def send(self, response: object, flags: int) -> None:
        self.sent += 1
        if self.sent >= self._fails and self.sent != self._recovers:
            raise RuntimeError("the stub cannot send")
        self.last = response if flags else None


class Request:
    """A Triton request with one tensor."""

    def __init__(self, content: dict[str, object], sender: Sender) -> None:
        self._content = json.dumps(content).encode()
        self._sender = sender

    def request_id(self) -> str:
        return "r"

    def get_response_sender(self) -> Sender:
        return self._sender

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return np.array([self._content], dtype=np.object_)


class Logger:
    @staticmethod
    def log_warn(message: str) -> None:
        assert message


class TritonError:
    INTERNAL = CANCELLED = 1

    def __init__(self, message: str, code: int) -> None:
        assert message


class Utils:
    """What an answer uses of triton_python_backend_utils."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Logger = Logger
    TritonError = TritonError

    @staticmethod
    def get_input_tensor_by_name(request: Request, name: str) -> Request:
        return request

    @staticmethod
    def Tensor(name: str, values: object) -> tuple[str, object]:  # noqa: N802
        return name, values

    @staticmethod
    def InferenceResponse(**content: object) -> dict[str, object]:  # noqa: N802
        return content


class Service:
    """One stream that ends when it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.stream = Stream("r", self._cancel)

    def _cancel(self) -> None:
        self.cancelled.set()
        self.stream.put(FailedEvent(fault=ServingFault.CANCELLED, message="the client lost interest"))

    def submit(self, request: object) -> Stream:
        return self.stream

    def health(self) -> Health:
        return Health(state=State.READY, world_size=1, waiting=0, running=1)

    def metrics(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fails", [1, 2])
def test_an_answer_that_cannot_be_sent_is_cancelled(fails: int) -> None:
    service, sender = Service(), Sender(fails)
    front_end = TritonFrontEnd(service, Utils)
    for index in range(2):
        service.stream.put(TokenEvent(index=index, token=1, text="a"))
    front_end.answer(Request({"question": [1]}, sender))
    assert service.cancelled.wait(30)
    front_end.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_last_response_that_cannot_be_sent_is_followed_by_an_error() -> None:
    """A client without a last response would wait forever; an error takes less room than a report."""
    service, sender = Service(), Sender(1, recovers=2)
    front_end = TritonFrontEnd(service, Utils)
    service.stream.put(DoneEvent(tokens=(1,), text="a", tail="", finish_reason="length", report={}))
    front_end.answer(Request({"question": [1]}, sender))
    front_end.close()
    assert sender.sent == 2
    assert isinstance(sender.last, dict)
    assert isinstance(sender.last["error"], TritonError)


def test_an_answer_that_was_sent_is_not_cancelled() -> None:
    service, sender = Service(), Sender(9)
    front_end = TritonFrontEnd(service, Utils)
    service.stream.put(TokenEvent(index=0, token=1, text="a"))
    service.stream.put(DoneEvent(tokens=(1,), text="a", tail="", finish_reason="length", report={}))
    front_end.answer(Request({"question": [1]}, sender))
    front_end.close()
    assert sender.sent == 2
    assert not service.cancelled.is_set()
