"""The same engines on a GPU: the references there answer like on the CPU, our kernels like the references."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.networks import NetworkOptions, build_engine, fp64, network, write_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.engine.build import BuildOptions
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.engine.tiles.lanes import CudaLane
from trt_redknot.ops.cuda.library import kernels_present
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.reports.compare import kl_divergence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")

POLICIES = (
    None,
    ReusePolicy(protect="all"),
    ReusePolicy(boundary=8, tail=0, top_entries=4, budget=0.5),
    ReusePolicy(boundary=8, tail=0, top_entries=4, budget=0.25, epilogue="active"),
)


def answers(engine: Engine, store: ArtifactStore, documents: list[list[int]], question: list[int]) -> list[Response]:
    segments = [*(Artifact(engine.build_artifact(store, document)) for document in documents), Tokens(question)]
    return [
        engine.generate(Request(segments=segments, max_new_tokens=8, stop_tokens=[], reuse=policy), store=store)
        for policy in POLICIES
    ]


def tokens(count: int) -> list[int]:
    return [random.randrange(97) for _ in range(count)]


def test_references_on_a_gpu_answer_like_on_the_cpu(tmp_path: Path) -> None:
    checkpoint = write_network(
        network(NetworkOptions(kinds="schchchc", seed=random.randrange(2**31))), tmp_path / "net"
    )
    directory = build_engine(checkpoint, tmp_path / "engine", options=fp64())
    documents, question = [tokens(n) for n in (128, 200, 90)], tokens(17)
    on_cpu = answers(Engine.open(directory), ArtifactStore(tmp_path / "cpu"), documents, question)
    on_gpu = answers(Engine.open(directory, device="cuda"), ArtifactStore(tmp_path / "gpu"), documents, question)
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(gpu.first_logits.cpu(), cpu.first_logits, atol=1e-6, rtol=0)
        assert gpu.tokens == cpu.tokens
        assert gpu.report.rows == cpu.report.rows


@pytest.mark.skipif(not kernels_present(), reason="the kernel library was not built (make plugins)")
def test_kernels_answer_like_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released head geometry, so that every kernel serves. In bf16 a random network routes near ties as rounding
    has it, so the kernels are held to what the references lose in bf16 against an fp32 engine."""
    options = NetworkOptions(
        seed=random.randrange(2**31), kinds="schchc", groups=2, heads_per_group=8, hidden=256, head_dim=512,
        rope_dim=64, hca=128, window=128, topk=64, index_heads=64, index_dim=128, experts=8, experts_per_token=6,
    )  # fmt: skip
    checkpoint = write_network(network(options), tmp_path / "net")
    build = BuildOptions(dtype="bfloat16", artifact_format=ArtifactFormat.BFLOAT16, chunk_rows=512)
    directory = build_engine(checkpoint, tmp_path / "engine", options=build)
    documents, question = [tokens(n) for n in (1024, 900, 1300)], tokens(60)
    kernels = answers(Engine.open(directory, device="cuda"), ArtifactStore(tmp_path / "kernels"), documents, question)
    monkeypatch.setattr("trt_redknot.engine.loading.CudaOps", lambda collectives, geometry: ReferenceOps(collectives))
    narrow = answers(Engine.open(directory, device="cuda"), ArtifactStore(tmp_path / "refs"), documents, question)
    wide = build_engine(checkpoint, tmp_path / "wide", options=BuildOptions(chunk_rows=512))
    exact = answers(Engine.open(wide, device="cuda"), ArtifactStore(tmp_path / "exact"), documents, question)

    def lost(responses: list[Response]) -> float:
        pairs = zip(exact, responses, strict=True)
        return sum(kl_divergence(a.first_logits.cpu(), b.first_logits.cpu()) for a, b in pairs) / len(exact)

    assert all(response.first_logits.isfinite().all() for response in kernels)
    assert [r.report.rows.total for r in kernels] == [r.report.rows.total for r in exact]
    assert lost(kernels) < 2 * lost(narrow) + 0.03, f"kernels {lost(kernels)}, references in bf16 {lost(narrow)}"


class HeldUp(CudaLane):
    """Every copy waits for a kernel that does nothing for some milliseconds."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(5_000_000)
        super().copy(target, source)


@pytest.mark.parametrize("options", [{"depth": 2}, {"depth": 4, "host_bytes": 1 << 30}], ids=["ring", "host tier"])
def test_a_copy_stream_that_is_held_up_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    """Bit for bit what direct reads give; the ring is late, and says so."""
    checkpoint = write_network(
        network(NetworkOptions(kinds="schchchc", seed=random.randrange(2**31))), tmp_path / "net"
    )
    directory = build_engine(checkpoint, tmp_path / "engine", options=fp64())
    documents, question = [tokens(n) for n in (128, 200, 90)], tokens(17)
    store = ArtifactStore(tmp_path / "store")
    direct = answers(Engine.open(directory, device="cuda", tiles=TileOptions(depth=0)), store, documents, question)
    ahead = Engine.open(directory, device="cuda", tiles=TileOptions(**options))
    in_time = answers(ahead, store, documents, question)
    monkeypatch.setattr("trt_redknot.engine.tiles.rank.lane_for", HeldUp)
    held_up = answers(ahead, store, documents, question)
    for one, two, three in zip(direct, in_time, held_up, strict=True):
        assert torch.equal(one.first_logits, two.first_logits)
        assert torch.equal(one.first_logits, three.first_logits)
        assert one.tokens == two.tokens == three.tokens
    late = [response.report.timings.late_s for response in held_up]
    assert max(late) > 0
    assert {"host", "pinned"} & set(in_time[2].report.bytes_by_tier)
