"""Narrower engines and artifacts: what they cost against the exact ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.networks import NetworkOptions, build_engine, network, write_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.engine.build import BuildOptions
from trt_redknot.reports.compare import kl_divergence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = network(NetworkOptions(kinds="schchchc", seed=random.randrange(2**31)))
    return write_network(model, tmp_path_factory.mktemp("network"))


def engine_of(checkpoint: Path, directory: Path, options: BuildOptions) -> Engine:
    return Engine.open(build_engine(checkpoint, directory / "engine", options=options))


def answers(engine: Engine, store: ArtifactStore, documents: list[list[int]], question: list[int]) -> list[Response]:
    """A stored prefix and relocated documents with active rows, then the same in the recompute arm."""
    segments = [*(Artifact(engine.build_artifact(store, d)) for d in documents), Tokens(question)]
    reuse = ReusePolicy(boundary=8, tail=0, top_entries=2, budget=0.5, tau=1.0)
    return [
        engine.generate(Request(segments=segments, max_new_tokens=4, stop_tokens=[], reuse=policy), store=store)
        for policy in (reuse, None)
    ]


def test_packed_artifacts_cost_little_beside_reuse_itself(checkpoint: Path, tmp_path: Path) -> None:
    draw = random.Random()
    documents = [[draw.randrange(97) for _ in range(n)] for n in (128, 200, 90)]
    question = [draw.randrange(97) for _ in range(20)]
    logits = {}
    for form in (ArtifactFormat.FLOAT32, ArtifactFormat.FP8):
        engine = engine_of(checkpoint, tmp_path / form, BuildOptions(chunk_rows=64, artifact_format=form))
        store = ArtifactStore(tmp_path / form / "store")
        reused, recomputed = answers(engine, store, documents, question)
        assert reused.report.admitted
        assert reused.report.rows.active > 0
        logits[form] = reused.first_logits
        sizes = sum(listed.published.bytes for listed in store.ls())
        logits[f"{form} bytes"] = sizes
    packing = kl_divergence(logits[ArtifactFormat.FLOAT32], logits[ArtifactFormat.FP8])
    assert 0 < packing < 0.05
    assert logits["fp8 bytes"] < 0.5 * logits["float32 bytes"]
    assert kl_divergence(recomputed.first_logits, logits[ArtifactFormat.FP8]) < 1.0


def test_a_bfloat16_engine_answers_like_a_float32_one(checkpoint: Path, tmp_path: Path) -> None:
    draw = random.Random()
    documents = [[draw.randrange(97) for _ in range(n)] for n in (128, 60)]
    question = [draw.randrange(97) for _ in range(20)]
    wide = engine_of(checkpoint, tmp_path / "wide", BuildOptions(chunk_rows=64))
    narrow = engine_of(
        checkpoint,
        tmp_path / "narrow",
        BuildOptions(chunk_rows=64, dtype="bfloat16", artifact_format=ArtifactFormat.BFLOAT16),
    )
    expected = answers(wide, ArtifactStore(tmp_path / "wide" / "store"), documents, question)
    found = answers(narrow, ArtifactStore(tmp_path / "narrow" / "store"), documents, question)
    for exact, rounded in zip(expected, found, strict=True):
        assert rounded.first_logits.isfinite().all()
        assert kl_divergence(exact.first_logits, rounded.first_logits) < 0.1
