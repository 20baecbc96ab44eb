"""Triton's side of a service: tensors to requests, events to responses. `model.py` of the model repository calls it.

`pb_utils`, which exists only inside of Triton's Python backend, is handed in.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from trt_redknot.config.documents import parse_json_object
from trt_redknot.errors import ConfigError, LaunchError, RedKnotError, RequestError
from trt_redknot.launch import world_communicator
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.ending import end_on_word
from trt_redknot.serving.frontend import Serving
from trt_redknot.serving.leader import Leader
from trt_redknot.serving.messages import (
    BuildRequest,
    BuiltEvent,
    DoneEvent,
    Event,
    FailedEvent,
    ServingError,
    ServingFault,
    ServingRequest,
    TokenEvent,
)
from trt_redknot.serving.orchestrator import START_TIMEOUT_S, Orchestrator
from trt_redknot.serving.parent import end_with_parent
from trt_redknot.serving.stream import Stream
from trt_redknot.serving.triton_metrics import MetricsMirror
from trt_redknot.serving.triton_repository import OWN_PARAMETERS, Mode

Action = Literal["generate", "build", "health"]
# How often an answer that has nothing new looks whether its client is still there.
_POLL_S = 0.05
_JOIN_S = 10.0

# Triton knows few kinds of errors; the fault itself leads the message.
_CODES = {
    ServingFault.INVALID_REQUEST: "INVALID_ARG",
    ServingFault.TOO_LARGE: "INVALID_ARG",
    ServingFault.MISSING_DOCUMENT: "NOT_FOUND",
    ServingFault.CANCELLED: "CANCELLED",
    ServingFault.QUEUE_FULL: "UNAVAILABLE",
    ServingFault.DEADLINE: "UNAVAILABLE",
    ServingFault.RANK_FAILED: "UNAVAILABLE",
    ServingFault.SHUTTING_DOWN: "UNAVAILABLE",
    ServingFault.INTERNAL: "INTERNAL",
}


def parse_request(content: bytes, request_id: str) -> ServingRequest | BuildRequest | Literal["health"]:
    """The request in the `request` tensor: JSON with an `action`, which is `generate` where it is left out.

    Args:
        request_id: what Triton calls the request; holds where the request does not name itself.

    Raises:
        RequestError: not JSON, an unknown action or key, a value of another type.
    """
    try:
        values = parse_json_object(content)
    except ValueError as error:
        raise RequestError("the request is not a JSON object", found=error) from error
    action = values.pop("action", "generate")
    if action not in get_args(Action):
        raise RequestError("the action is unknown", expected=" or ".join(get_args(Action)), found=repr(action))
    if action == "health":
        if values:
            raise RequestError("a health request has no other keys", found=", ".join(map(repr, values)))
        return "health"
    values.setdefault("request_id", request_id)
    return BuildRequest.parse(values) if action == "build" else ServingRequest.parse(values)


def read_parameters(model_config: str) -> tuple[Mode, float, ServingConfig]:
    """Mode, seconds a start may take, and the service's settings, from the model's configuration.

    Raises:
        ConfigError: a parameter is unknown, missing or ill-formed, or the repository was not filled in.
    """
    found = json.loads(model_config)["parameters"]
    parameters = {name: str(value["string_value"]) for name, value in found.items()}
    source = "the parameters of config.pbtxt"
    for name, value in parameters.items():
        if value.startswith("${"):
            raise ConfigError(
                f"parameter {name!r} is not filled in", found=value, path=source,
                remedy="Start with run/serve_triton.sh, or python -m trt_redknot.serving.triton_repository.",
            )  # fmt: skip
    mode = parameters.get("mode") or "orchestrator"
    if mode not in get_args(Mode):
        raise ConfigError("parameter 'mode' is invalid", expected=" or ".join(get_args(Mode)), found=mode, path=source)
    limit = parameters.get("start_timeout_s") or str(START_TIMEOUT_S)
    try:
        start_timeout_s = float(limit)
    except ValueError as error:
        raise ConfigError(
            "parameter 'start_timeout_s' is invalid", expected="seconds", found=limit, path=source
        ) from error
    others = {name: value for name, value in parameters.items() if name not in OWN_PARAMETERS}
    return cast(Mode, mode), start_timeout_s, ServingConfig.of(others, source)


class TritonFrontEnd:
    """Answers Triton's requests from a service. Open one with :meth:`open`.

    Args:
        utils: triton_python_backend_utils.
    """

    def __init__(self, service: Serving, utils: Any) -> None:
        self._service = service
        self._utils = utils
        self._answering: set[threading.Thread] = set()
        self._metrics = MetricsMirror(service.metrics, utils)

    @classmethod
    def open(cls, args: Mapping[str, str], utils: Any) -> TritonFrontEnd:
        """Start the service that the model's parameters describe. `args` are those of Triton's `initialize`.

        Raises:
            RedKnotError: the parameters, the engine or the ranks.
        """
        mode, start_timeout_s, config = read_parameters(args["model_config"])
        opened: list[TritonFrontEnd] = []

        def close() -> None:
            for front_end in opened:
                front_end.close()

        # Before the engine is loaded, which may take minutes.
        follow = end_on_word(os.environ, close)
        if mode == "leader":
            _first_time_only(Path(args["model_repository"]))
            opened.append(cls(Leader.open(config, world_communicator()), utils))
            end_with_parent(close)
            return opened[0]
        service = Orchestrator(config)
        opened.append(cls(service, utils))
        end_with_parent(close)
        try:
            service.await_ready(start_timeout_s)
        except LaunchError:
            close()
            # What Triton does with the error keeps Python from running.
            follow()
            raise
        return opened[0]

    def is_ready(self) -> bool:
        return self._service.health().ready

    def answer(self, request: Any) -> None:
        """Answer one Triton request; returns at once, the responses follow."""
        answer = _Answer(request, self._service, self._utils)
        thread = threading.Thread(target=self._run, args=(answer,), daemon=True)
        self._answering.add(thread)
        thread.start()

    def close(self) -> None:
        """End the service; open requests fail."""
        self._metrics.close()
        self._service.close()
        for thread in list(self._answering):
            thread.join(_JOIN_S)

    def _run(self, answer: _Answer) -> None:
        try:
            answer.run()
        finally:
            self._answering.discard(threading.current_thread())


class _Answer:
    """One Triton request."""

    def __init__(self, request: Any, service: Serving, utils: Any) -> None:
        tensor = utils.get_input_tensor_by_name(request, "request").as_numpy()
        self._content = bytes(tensor.reshape(-1)[0])
        # Known before the content is read, so that what is wrong with it can be told of a request.
        self._request_id = str(request.request_id()) or uuid.uuid4().hex
        self._sender = request.get_response_sender()
        self._service = service
        self._utils = utils
        self._done = False

    def run(self) -> None:
        try:
            self._answer()
        except ServingError as error:
            self._fail(error.fault, str(error))
        except RequestError as error:
            self._fail(ServingFault.INVALID_REQUEST, str(error))
        except RedKnotError as error:
            self._fail(ServingFault.INTERNAL, str(error))
        finally:
            # A request without a last response would keep its client waiting forever.
            if not self._done:
                self._fail(ServingFault.INTERNAL, "a fault of the server; its log says more")

    def _answer(self) -> None:
        request = parse_request(self._content, self._request_id)
        if request == "health":
            health = self._service.health()
            if not health.ready:
                raise ServingError(ServingFault.RANK_FAILED, health.detail or f"the service is {health.state}")
            self._send([], "", health.to_json())
            return
        self._request_id = request.request_id or self._request_id
        stream = self._service.submit(request)
        self._follow(stream, streamed=isinstance(request, ServingRequest) and request.stream)

    def _follow(self, stream: Stream, *, streamed: bool) -> None:
        cancelled = False
        try:
            while not self._done:
                if not cancelled and self._sender.is_cancelled():
                    cancelled = True
                    stream.cancel()
                event = stream.poll(_POLL_S)
                if event is not None:
                    self._tell(event, streamed=streamed)
        finally:
            # What cannot be sent need not be computed.
            if not stream.complete:
                stream.cancel()

    def _tell(self, event: Event, *, streamed: bool) -> None:
        match event:
            case TokenEvent():
                if streamed:
                    self._send([event.token], event.text, None)
            case DoneEvent():
                tokens, text = ([], event.tail) if streamed else (list(event.tokens), event.text or "")
                self._send(tokens, text, event.to_json())
            case FailedEvent():
                self._fail(event.fault, event.message)
            case BuiltEvent():
                # The report lists them all.
                pass

    def _send(self, tokens: list[int], text: str, report: dict[str, object] | None) -> None:
        final = report is not None
        tensor = self._utils.Tensor
        response = self._utils.InferenceResponse(
            output_tensors=[
                tensor("tokens", np.array(tokens, dtype=np.int64)),
                tensor("text", np.array([text.encode()], dtype=np.object_)),
                tensor("final", np.array([final])),
                tensor("report", np.array([json.dumps(report).encode() if final else b""], dtype=np.object_)),
            ]
        )
        self._sender.send(response, flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
        self._done = final

    def _fail(self, fault: ServingFault, message: str) -> None:
        self._done = True
        if fault is not ServingFault.CANCELLED:
            self._utils.Logger.log_warn(f"request {self._request_id}: {fault}: {message}")
        code = getattr(self._utils.TritonError, _CODES[fault])
        error = self._utils.TritonError(f"{fault}: {message}", code)
        self._sender.send(
            self._utils.InferenceResponse(error=error), flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )


def _first_time_only(model_folder: Path) -> None:
    """An MPI rank that has left its job cannot join again: in leader mode a model is loaded once in a job."""
    job = "".join(letter if letter.isalnum() else "-" for letter in os.environ.get("PMIX_NAMESPACE", "none"))
    marker = model_folder / f".leader-{job}"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError as error:
        raise LaunchError(
            "in leader mode the model cannot be loaded a second time",
            remedy="Start the job again, or use orchestrator mode, in which models can be reloaded.",
        ) from error
    except OSError as error:
        raise LaunchError(f"the model's folder cannot be written: {error.strerror}", path=marker) from error
