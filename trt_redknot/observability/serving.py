"""Metrics of a service: what became of requests, how long they took, how many wait and run."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trt_redknot.reports.report import Report

_TTFT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TPOT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# What was asked for, and what ran.
_KINDS = ("reuse", "recompute", "build")
_ARMS = ("reuse", "recompute")
_ROW_CLASSES = ("protected", "active", "omitted")


class ServingMetrics:
    """Counts on rank 0. Calls may come from several threads.

    Args:
        outcomes: every way in which a request can end.
    """

    def __init__(self, outcomes: Sequence[str], registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "redknot_requests", "Requests that ended, by outcome and by what was asked for.", ["outcome", "kind"],
            registry=registry,
        )  # fmt: skip
        self._answers = Counter(
            "redknot_answers", "Requests answered, by the arm that ran.", ["arm"], registry=registry
        )
        self._tokens = Counter("redknot_generated_tokens", "Tokens generated.", registry=registry)
        self._documents = Counter(
            "redknot_documents", "Documents asked to be built, by whether they were.", ["built"], registry=registry
        )
        self._ttft = Histogram(
            "redknot_ttft_seconds", "Seconds from submission to the first token, by arm.", ["arm"],
            buckets=_TTFT_SECONDS, registry=registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "redknot_tpot_seconds", "Seconds a token after the first, mean of an answer, by arm.", ["arm"],
            buckets=_TPOT_SECONDS, registry=registry,
        )  # fmt: skip
        self._rows = Counter(
            "redknot_rows", "Prompt rows of answered requests, by arm and class.", ["arm", "class"], registry=registry
        )
        self._experts = Counter(
            "redknot_expert_rows", "Prompt rows of reusable layers with a learned router, by experts that they ran.",
            ["experts"], registry=registry,
        )  # fmt: skip
        self._late = Counter(
            "redknot_prefetch_late_seconds", "Seconds that prompts waited for tiles that were read ahead.",
            registry=registry,
        )  # fmt: skip
        self._waiting = Gauge("redknot_waiting_requests", "Requests in the queue.", registry=registry)
        self._running = Gauge(
            "redknot_running_requests", "Requests and builds that hold cache rows.", registry=registry
        )
        self._cache = Gauge("redknot_cache_free_rows", "Rows of the cache pool that are free.", registry=registry)
        # A series that appears with its first event has no rate for it.
        for kind in _KINDS:
            for outcome in outcomes:
                self._requests.labels(outcome=outcome, kind=kind)
        for arm in _ARMS:
            self._answers.labels(arm=arm)
            self._ttft.labels(arm=arm)
            self._tpot.labels(arm=arm)
            for row_class in _ROW_CLASSES:
                self._rows.labels(arm, row_class)
        for built in ("yes", "no"):
            self._documents.labels(built=built)

    def ended(self, outcome: str, kind: str) -> None:
        self._requests.labels(outcome=outcome, kind=kind).inc()

    def answered(self, report: Report, *, ttft_s: float, tpot_s: float | None) -> None:
        """Args: tpot_s: None for an answer of one token."""
        arm = report.arm
        self._answers.labels(arm=arm).inc()
        self._ttft.labels(arm=arm).observe(ttft_s)
        if tpot_s is not None:
            self._tpot.labels(arm=arm).observe(tpot_s)
        for row_class in _ROW_CLASSES:
            self._rows.labels(arm, row_class).inc(getattr(report.rows, row_class))
        for experts, count in enumerate(report.k_histogram):
            if experts:
                self._experts.labels(str(experts)).inc(count)
        self._late.inc(report.timings.late_s)

    def generated(self, tokens: int) -> None:
        self._tokens.inc(tokens)

    def document(self, *, built: bool) -> None:
        self._documents.labels(built="yes" if built else "no").inc()

    def load(self, *, waiting: int, running: int, free_rows: int) -> None:
        self._waiting.set(waiting)
        self._running.set(running)
        self._cache.set(free_rows)
