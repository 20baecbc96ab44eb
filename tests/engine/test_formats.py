"""Narrower engines and artifacts: what they cost against the exact ones."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.networks import NetworkOptions, build_engine, network, write_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.engine.build import BuildOptions
from trt_redknot.errors import EngineError
from trt_redknot.reports.compare import kl_divergence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = network(NetworkOptions(kinds="schchchc", seed=random.randrange(2**31)))
    return write_network(model, tmp_path_factory.mktemp("network"))


def engine_of(checkpoint: Path, directory: Path, options: BuildOptions) -> Engine:
    return Engine.open(build_engine(checkpoint, directory / "engine", options=options))


REUSE = ReusePolicy(boundary=8, tail=0, top_entries=2, budget=0.5, tau=1.0)


def answers(
    engine: Engine,
    store: ArtifactStore,
    documents: list[list[int]],
    question: list[int],
    arms: tuple[ReusePolicy | None, ...] = (REUSE, None),
) -> list[Response]:
    """A stored prefix and relocated documents with active rows, then the same in the recompute arm."""
    segments = [*(Artifact(engine.build_artifact(store, d)) for d in documents), Tokens(question)]
    return [
        engine.generate(Request(segments=segments, max_new_tokens=2, stop_tokens=[], reuse=policy), store=store)
        for policy in arms
    ]


def test_packed_artifacts_cost_little_beside_reuse_itself(checkpoint: Path, tmp_path: Path) -> None:
    draw = random.Random()
    documents = [[draw.randrange(97) for _ in range(n)] for n in (128, 200, 90)]
    questions = [[draw.randrange(97) for _ in range(20)] for _ in range(5)]
    engines = {
        form: engine_of(checkpoint, tmp_path / form, BuildOptions(chunk_rows=64, artifact_format=form))
        for form in (ArtifactFormat.FLOAT32, ArtifactFormat.FP8)
    }
    stores = {form: ArtifactStore(tmp_path / form / "store") for form in engines}
    packing, reuse = [], []
    for question in questions:
        (exact,) = answers(
            engines[ArtifactFormat.FLOAT32], stores[ArtifactFormat.FLOAT32], documents, question, (REUSE,)
        )
        packed, recomputed = answers(engines[ArtifactFormat.FP8], stores[ArtifactFormat.FP8], documents, question)
        assert all(each.report.admitted and each.report.rows.active > 0 for each in (exact, packed))
        packing.append(kl_divergence(exact.first_logits, packed.first_logits))
        reuse.append(kl_divergence(recomputed.first_logits, packed.first_logits))
    # Random weights route many near ties, and a tie that falls the other way is far off for that alone: 0.01 to 0.07 is
    # what most networks lose. Distributions that have nothing to do with each other are more than a nat apart.
    assert 0 < statistics.median(packing) < 0.3
    assert statistics.median(reuse) < 1.0
    exact_bytes, packed_bytes = (sum(listed.published.bytes for listed in store.ls()) for store in stores.values())
    assert packed_bytes < 0.5 * exact_bytes


def test_a_bfloat16_engine_answers_like_a_float32_one(checkpoint: Path, tmp_path: Path) -> None:
    draw = random.Random()
    documents = [[draw.randrange(97) for _ in range(n)] for n in (128, 60)]
    wide = engine_of(checkpoint, tmp_path / "wide", BuildOptions(chunk_rows=64))
    narrow = engine_of(
        checkpoint,
        tmp_path / "narrow",
        BuildOptions(chunk_rows=64, dtype="bfloat16", artifact_format=ArtifactFormat.BFLOAT16),
    )
    far: list[list[float]] = [[], []]
    for _ in range(5):
        question = [draw.randrange(97) for _ in range(20)]
        expected = answers(wide, ArtifactStore(tmp_path / "wide" / "store"), documents, question)
        found = answers(narrow, ArtifactStore(tmp_path / "narrow" / "store"), documents, question)
        for arm, exact, rounded in zip(far, expected, found, strict=True):
            assert rounded.first_logits.isfinite().all()
            arm.append(kl_divergence(exact.first_logits, rounded.first_logits))
    # The best but one: the others may have a tie that falls the other way.
    assert max(sorted(arm)[1] for arm in far) < 0.1, far


def test_experts_in_fp8(tmp_path: Path) -> None:
    """A quarter of the bytes; answers that are near; artifacts of its own."""
    draw = random.Random()
    options = NetworkOptions(
        kinds="schcsh", hash_layers=1, hidden=128, expert_width=128, experts=4, seed=draw.randrange(2**31)
    )
    checkpoint = write_network(network(options), tmp_path / "checkpoint")
    documents = [[draw.randrange(97) for _ in range(n)] for n in (128, 60)]
    question = [draw.randrange(97) for _ in range(9)]
    engines = {
        experts: engine_of(checkpoint, tmp_path / experts, BuildOptions(chunk_rows=64, experts=experts))
        for experts in ("same", "fp8")
    }
    store = ArtifactStore(tmp_path / "store")
    found = {experts: answers(engine, store, documents, question) for experts, engine in engines.items()}
    assert all(each[0].report.arm == "reuse" for each in found.values())
    assert len(store.ls()) == 4, "artifacts of rounded and of plain experts are told apart"
    far = []
    for _ in range(9):
        prompt = Request(segments=[Tokens([draw.randrange(97) for _ in range(40)])], max_new_tokens=1, reuse=None)
        plain, rounded = (engine.generate(prompt).first_logits for engine in engines.values())
        far.append(float((plain - rounded).norm() / plain.norm()))
    # Ties that fall the other way are far off for that alone; half of the prompts have none that matters.
    assert 1e-4 < sorted(far)[2] < 0.3, far
    sizes = {experts: expert_bytes(tmp_path / experts / "engine") for experts in engines}
    assert sizes["fp8"] < 0.27 * sizes["same"], "a byte and a scale a block, not four bytes"


def expert_bytes(engine: Path) -> int:
    return sum(
        tensor.nbytes
        for path in (engine / "rank-0000").glob("layer-*")
        for name, tensor in load_file(path).items()
        if name.startswith("experts.")
    )


def test_experts_without_fp8_blocks_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no FP8 blocks"):
        engine_of(checkpoint, tmp_path, BuildOptions(experts="fp8"))
    assert not (tmp_path / "engine").exists()
