"""One request on rank 0, from submission to its last event."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from trt_redknot.request.file import RequestFile
from trt_redknot.serving.config import Missing
from trt_redknot.serving.messages import BuildRequest, BuiltEvent, FailedEvent, ServingFault
from trt_redknot.serving.stream import Stream
from trt_redknot.serving.text import AnswerText


class Phase(StrEnum):
    """WAITING in its tenant's queue; then, one after the other: TO_BUILD and BUILDING while documents have to be built
    first; LOADING while its artifacts are verified; READY to be admitted; ADMITTED, it waits for cache rows;
    PREFILLING; DECODING; ENDING, its report is to be made; OVER."""

    WAITING = "waiting"
    TO_BUILD = "to_build"
    BUILDING = "building"
    LOADING = "loading"
    READY = "ready"
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDING = "ending"
    OVER = "over"


QUEUED = frozenset({Phase.WAITING, Phase.TO_BUILD, Phase.LOADING, Phase.READY})
HOLDING = frozenset({Phase.BUILDING, Phase.ADMITTED, Phase.PREFILLING, Phase.DECODING, Phase.ENDING})


@dataclass(kw_only=True)
class Times:
    """Monotonic seconds at which things happened; None: not yet, or never."""

    submitted: float
    staged: float | None = None
    loading: float | None = None
    verified: float | None = None
    building: float | None = None
    admitted: float | None = None
    prefilling: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    def tpot_s(self, tokens: int) -> float | None:
        """Seconds a token after the first; None where there are none."""
        if tokens < 2 or self.first_token is None or self.last_token is None:
            return None
        return (self.last_token - self.first_token) / (tokens - 1)

    def to_json(self, tokens: int) -> dict[str, float | None]:
        """Durations in seconds, None for what did not take place.

        queue_s: until it was looked at. ready_s: until then that it could be admitted: documents built, artifacts
        verified, a place among those that run. room_s: until there were cache rows. prefill_s, ttft_s: until the first
        token, from there and from submission. tpot_s: a token after the first. total_s: from submission to the end.
        """

        def between(start: float | None, stop: float | None) -> float | None:
            return None if start is None or stop is None else stop - start

        return {
            "queue_s": between(self.submitted, self.staged),
            "ready_s": between(self.staged, self.admitted),
            "room_s": between(self.admitted, self.prefilling),
            "prefill_s": between(self.prefilling, self.first_token),
            "ttft_s": between(self.submitted, self.first_token),
            "decode_s": between(self.first_token, self.last_token),
            "tpot_s": self.tpot_s(tokens),
            "total_s": between(self.submitted, self.ended),
        }


@dataclass(kw_only=True, eq=False)
class Job:
    """A request with what has become of it.

    Attributes:
        request: without texts; None where documents are built and nothing is asked.
        documents: token ids of the documents that are still to be built.
        rebuild: build them even where they are there.
        deadline: monotonic seconds, None: no limit.
        cost: tokens that its tenant was charged.
        cancelled: set by any thread.
        not_before: monotonic seconds before which a build is not tried again.
        fault, message: why it is to be dropped; None: nothing went wrong.
    """

    number: int
    request_id: str
    tenant: str
    stream: Stream
    request: RequestFile | None
    documents: list[tuple[int, ...]]
    rebuild: bool
    missing: Missing
    deadline: float | None
    text: AnswerText
    times: Times
    cost: int
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    fault: ServingFault | None = None
    message: str = ""
    tokens: list[int] = field(default_factory=list)
    built: list[BuiltEvent] = field(default_factory=list)
    build_started: float = 0.0
    not_before: float = 0.0

    @property
    def artifact_ids(self) -> tuple[str, ...]:
        """Artifacts whose files the request will read."""
        if self.request is None or self.request.reuse is None:
            return ()
        return tuple(segment.artifact for segment in self.request.segments if segment.artifact is not None)

    @property
    def kind(self) -> str:
        """For counters and the log: ``build``, or the arm that was asked for."""
        return kind_of(self.request)

    def fail(self, fault: ServingFault, message: str) -> bool:
        """Tell the client. False where it knows an end already."""
        return self.stream.put(FailedEvent(fault=fault, message=message))


def kind_of(request: RequestFile | BuildRequest | None) -> str:
    """``build``, or the arm that a request asks for."""
    if not isinstance(request, RequestFile):
        return "build"
    return "recompute" if request.reuse is None else "reuse"
