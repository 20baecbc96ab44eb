"""Metrics: what a store and admission do is what is counted, per object, in text that Prometheus reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, identity, together
from trt_redknot.admission import Admission, FallbackReason, admit
from trt_redknot.artifacts import ArtifactError, ArtifactStore, Part
from trt_redknot.collectives import Collectives, LocalCollectives
from trt_redknot.errors import StoreError
from trt_redknot.observability.events import AllEvents, NoEvents
from trt_redknot.observability.metrics import StoreMetrics
from trt_redknot.request.request import Artifact

LOCAL = LocalCollectives()
TOKENS = list(range(20))


def samples(metrics: StoreMetrics) -> dict[tuple[str, ...], float]:
    """Values by name and label values, as a scraper reads them."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }


def test_hits_misses_bytes_builds_evictions_quarantines(tmp_path: Path) -> None:
    metrics = StoreMetrics()
    store = ArtifactStore(tmp_path, events=AllEvents(NoEvents(), metrics))
    artifact_id = build_artifact(store, TOKENS, LOCAL)
    size = store.stat().bytes
    with pytest.raises(ArtifactError):
        store.open("0" * 32)
    with store.open(artifact_id, rank=0) as lease:
        lease.tensor(Part.LATENTS, 0)
        files = sum(file.size for file in lease.certificate.files)
    with store.open(artifact_id, rank=0):
        pass
    build_artifact(store, TOKENS, LOCAL)
    counted = samples(metrics)
    assert counted["redknot_lookups_total", "hit", "read"] == 2
    assert counted["redknot_lookups_total", "miss", "read"] == 1
    # Looked up before and after the lock of the first build, and found by the second.
    assert counted["redknot_lookups_total", "miss", "build"] == 2
    assert counted["redknot_lookups_total", "hit", "build"] == 1
    assert counted["redknot_bytes_total", "disk"] == files, "the second open finds every file verified"
    assert counted["redknot_bytes_total", "host"] == len(TOKENS) * GEOMETRY.head_dim * 4
    assert counted["redknot_build_seconds_count",] == 1
    assert counted["redknot_build_seconds_sum",] > 0
    assert 0 < counted["redknot_built_bytes_total",] < size
    limited = ArtifactStore(tmp_path, capacity_bytes=size + 100, events=metrics)
    other = build_artifact(limited, TOKENS[:-1], LOCAL)
    next((tmp_path / "default" / other).rglob("streams.safetensors")).unlink()
    assert [verdict.quarantined is not None for verdict in limited.verify()] == [True]
    with pytest.raises(ArtifactError):
        limited.open(other)
    counted = samples(metrics)
    assert counted["redknot_evictions_total",] == 1
    assert counted["redknot_evicted_bytes_total",] == size
    assert counted["redknot_quarantines_total",] == 1


def test_requests_are_counted_once_with_their_reason(tmp_path: Path) -> None:
    metrics = [StoreMetrics(), StoreMetrics()]

    def work(ranks: Collectives, artifact_id: str) -> Admission:
        store = ArtifactStore(tmp_path, events=metrics[ranks.rank])
        with admit(
            [Artifact(artifact_id, tokens=TOKENS)], store, identity=identity(), geometry=GEOMETRY, profile=PROFILE,
            collectives=ranks, deadline_s=30.0,
        ) as admission:  # fmt: skip
            return admission

    assert samples(metrics[0])["redknot_fallbacks_total", "missing_artifact"] == 0
    together(2, lambda ranks: work(ranks, "0" * 32))
    built = together(2, lambda ranks: build_artifact(ArtifactStore(tmp_path), TOKENS, ranks))[0]
    assert isinstance(built, str)
    outcomes = together(2, lambda ranks: work(ranks, built))
    assert all(isinstance(outcome, Admission) and outcome.admitted for outcome in outcomes), outcomes
    both = [samples(each) for each in metrics]
    for reason in FallbackReason:
        wanted = float(reason is FallbackReason.MISSING_ARTIFACT)
        assert sum(each["redknot_fallbacks_total", reason.value] for each in both) == wanted
    assert [each["redknot_admitted_total",] for each in both] == [1, 0]
    assert [each["redknot_reused_documents_total",] for each in both] == [1, 0]


def test_totals_are_those_of_the_disk_and_a_bad_store_spoils_no_other(tmp_path: Path) -> None:
    mine, yours = (ArtifactStore(tmp_path / "store", namespace=name) for name in ("mine", "yours"))
    artifact_id = build_artifact(mine, TOKENS, LOCAL)
    mine.pin(artifact_id)
    mine.set_quota(10**9)
    metrics = StoreMetrics()
    metrics.watch(mine, yours)
    counted = samples(metrics)
    assert counted["redknot_store_artifacts", "mine"] == 1
    assert counted["redknot_store_bytes", "mine"] == counted["redknot_store_pinned_bytes", "mine"] == mine.stat().bytes
    assert counted["redknot_store_capacity_bytes", "mine"] == 10**9
    assert counted["redknot_store_artifacts", "yours"] == 0
    assert ("redknot_store_capacity_bytes", "yours") not in counted
    (tmp_path / "store" / ".quotas" / "mine.json").write_text("{}")
    counted = samples(metrics)
    assert counted["redknot_store_readable", "mine"] == 0
    assert counted["redknot_store_readable", "yours"] == 1
    assert ("redknot_store_artifacts", "mine") not in counted


def test_two_objects_share_nothing(tmp_path: Path) -> None:
    one, two = StoreMetrics(), StoreMetrics()
    build_artifact(ArtifactStore(tmp_path, events=one), TOKENS, LOCAL)
    assert samples(one)["redknot_build_seconds_count",] == 1
    assert samples(two)["redknot_build_seconds_count",] == 0


def test_the_text_replaces_the_file_in_one_piece(tmp_path: Path) -> None:
    target = tmp_path / "a" / "redknot.prom"
    metrics = StoreMetrics()
    metrics.write(target)
    metrics.write(target)
    assert target.read_text() == metrics.text()
    assert os.listdir(target.parent) == ["redknot.prom"]
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(StoreError, match="metrics cannot be written"):
        metrics.write(blocked / "below.prom")
