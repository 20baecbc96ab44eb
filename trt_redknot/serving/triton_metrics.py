"""The service's metrics on Triton's metrics endpoint.

The service counts in a registry of its own, which may live in another process. What it says is copied from time to time
into metrics that Triton knows. Triton's histograms take observations, not sums, so the parts of a histogram become
counters of the names that they have in Prometheus' text.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_INTERVAL_S = 2.0

_log = logging.getLogger("trt_redknot.serving.metrics")


class MetricsMirror:
    """Copies metrics every two seconds, until closed.

    Args:
        read: gives the metrics as Prometheus text; an empty text leaves everything as it is.
        utils: triton_python_backend_utils.
    """

    def __init__(self, read: Callable[[], str], utils: Any, *, interval_s: float = _INTERVAL_S) -> None:
        self._read = read
        self._utils = utils
        self._interval_s = interval_s
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def copy(self) -> None:
        """Copy once."""
        for family in text_string_to_metric_families(self._read()):
            kind = "GAUGE" if family.type in ("gauge", "unknown") else "COUNTER"
            for sample in family.samples:
                if sample.name.endswith("_created") or not math.isfinite(sample.value):
                    continue
                metric = self._metric(sample.name, kind, family.documentation, dict(sample.labels))
                if kind == "GAUGE":
                    metric.set(sample.value)
                elif (growth := sample.value - metric.value()) > 0:
                    metric.increment(growth)

    def _run(self) -> None:
        failing = False
        while not self._closed.wait(self._interval_s):
            try:
                self.copy()
                failing = False
            except Exception:  # noqa: BLE001 - metrics that fail for a while must not be lost for good
                # Once said is enough.
                if not failing:
                    _log.exception("the metrics cannot be copied")
                failing = True

    def _metric(self, name: str, kind: str, description: str, labels: dict[str, str]) -> Any:
        family_type = self._utils.MetricFamily
        if name not in self._families:
            self._families[name] = family_type(
                name=name, description=description or name, kind=getattr(family_type, kind)
            )
        key = (name, tuple(sorted(labels.items())))
        if key not in self._metrics:
            self._metrics[key] = self._families[name].Metric(labels=labels)
        return self._metrics[key]
