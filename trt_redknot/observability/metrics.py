"""Metrics in Prometheus terms, in a registry of their own: made, handed in, written as text. Nothing is global."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.errors import StoreError
from trt_redknot.observability.events import Lookup, Purpose, Tier
from trt_redknot.textfile import replace_text

if TYPE_CHECKING:
    from trt_redknot.artifacts.store import ArtifactStore

_BUILD_SECONDS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)


class StoreMetrics:
    """Counts what one process's store and admission tell. Hand it in as `events` of an ArtifactStore.

    Every rank counts its own: sum `redknot_bytes_total` over ranks, take requests and builds from rank 0.

    Attributes:
        registry: to be served by prometheus_client's own HTTP exporter, or combined with others.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._lookups = Counter(
            "redknot_lookups", "Artifacts looked up, by outcome and purpose.", ["outcome", "purpose"],
            registry=self.registry,
        )  # fmt: skip
        self._bytes = Counter("redknot_bytes", "Artifact bytes moved, by tier.", ["tier"], registry=self.registry)
        self._seconds = Histogram(
            "redknot_build_seconds", "Seconds from begin to publish.", buckets=_BUILD_SECONDS, registry=self.registry
        )
        self._built = Counter("redknot_built_bytes", "Bytes of artifacts published.", registry=self.registry)
        self._evictions = Counter("redknot_evictions", "Generations evicted for room.", registry=self.registry)
        self._evicted = Counter("redknot_evicted_bytes", "Bytes evicted for room.", registry=self.registry)
        self._quarantines = Counter("redknot_quarantines", "Corrupt generations set aside.", registry=self.registry)
        self._admitted = Counter("redknot_admitted", "Requests that reuse.", registry=self.registry)
        self._documents = Counter("redknot_reused_documents", "Documents of those requests.", registry=self.registry)
        self._fallbacks = Counter(
            "redknot_fallbacks", "Requests recomputed, by reason.", ["reason"], registry=self.registry
        )
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        # A series that appears with its first event has no rate for it.
        for reason in FallbackReason:
            self._fallbacks.labels(reason=reason.value)
        for tier in Tier:
            self._bytes.labels(tier=tier.value)
        for outcome in Lookup:
            for purpose in Purpose:
                self._lookups.labels(outcome=outcome.value, purpose=purpose.value)

    def looked_up(self, artifact_id: str, outcome: Lookup, purpose: Purpose) -> None:
        self._lookups.labels(outcome=outcome.value, purpose=purpose.value).inc()

    def moved(self, tier: Tier, bytes: int) -> None:
        self._bytes.labels(tier=tier.value).inc(bytes)

    def built(self, artifact_id: str, generation: int, *, bytes: int, seconds: float) -> None:
        self._seconds.observe(seconds)
        self._built.inc(bytes)

    def evicted(self, artifact_id: str, generation: int, bytes: int) -> None:
        self._evictions.inc()
        self._evicted.inc(bytes)

    def quarantined(self, artifact_id: str, generation: int, reason: str) -> None:
        self._quarantines.inc()

    def admitted(self, documents: int) -> None:
        self._admitted.inc()
        self._documents.inc(documents)

    def fell_back(self, reason: str, detail: str) -> None:
        self._fallbacks.labels(reason=FallbackReason(reason).value).inc()

    def watch(self, *stores: ArtifactStore) -> None:
        """Add gauges of the stores' namespaces, read from disk at every scrape. Called once, with all of them."""
        self.registry.register(_Totals(stores))

    def text(self) -> str:
        """All metrics in the text exposition format."""
        return generate_latest(self.registry).decode()

    def write(self, path: Path | str) -> None:
        """Replace `path` by the metrics as text, in one rename, as node_exporter's textfile collector wants it.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            replace_text(Path(path), self.text())
        except OSError as error:
            raise StoreError(f"the metrics cannot be written: {error.strerror or error}", path=path) from error


_GAUGES = {
    "artifacts": "Artifacts in the namespace.",
    "generations": "Generations in the namespace.",
    "bytes": "Bytes of all generations.",
    "pinned_bytes": "Bytes of pinned artifacts.",
    "reserved_bytes": "Bytes promised to running builds.",
    "capacity_bytes": "Quota of the namespace.",
    "quarantined": "Generations in quarantine.",
    "disk_free_bytes": "Bytes free on the store's disk.",
}


class _Totals(Collector):
    """Gauges of namespaces. A store that cannot be read shows as not readable; it takes no other metric down."""

    def __init__(self, stores: Sequence[ArtifactStore]) -> None:
        self._stores = tuple(stores)

    def describe(self) -> list[GaugeMetricFamily]:
        # Without it the registry would walk the disk once to learn the names.
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        readable = GaugeMetricFamily("redknot_store_readable", "1 where totals could be read.", labels=["namespace"])
        families = {
            name: GaugeMetricFamily(f"redknot_store_{name}", text, labels=["namespace"])
            for name, text in _GAUGES.items()
        }
        for store in self._stores:
            try:
                status = store.stat()
            except StoreError:
                readable.add_metric([store.namespace], 0)
                continue
            readable.add_metric([store.namespace], 1)
            for name, family in families.items():
                value = getattr(status, name)
                if value is not None:
                    family.add_metric([store.namespace], value)
        yield readable
        yield from families.values()
