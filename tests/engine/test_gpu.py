"""The same engines on a GPU: the references there answer like on the CPU, our kernels like the references."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu import needs_kernels
from tests.support.networks import NetworkOptions, build_engine, fp64, network, write_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.copies import HostCopies
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.engine.build import BuildOptions
from trt_redknot.engine.decode import Decoder, QueuedStep
from trt_redknot.engine.generate import Generation
from trt_redknot.engine.pool import PoolRows
from trt_redknot.engine.prefill import Prefill, Prefilled
from trt_redknot.engine.steps import Steps, drain
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.engine.tiles.lanes import CudaLane
from trt_redknot.ops.cuda.backend import CudaOps
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.reports.compare import kl_divergence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")

POLICIES = (
    None,
    ReusePolicy(protect="all"),
    ReusePolicy(boundary=8, tail=0, top_entries=4, budget=0.5),
    ReusePolicy(boundary=8, tail=0, top_entries=4, budget=0.25, epilogue="active"),
)


def answers(
    engine: Engine,
    store: ArtifactStore,
    documents: list[list[int]],
    question: list[int],
    policies: Sequence[ReusePolicy | None] = POLICIES,
) -> list[Response]:
    segments = [*(Artifact(engine.build_artifact(store, document)) for document in documents), Tokens(question)]
    return [
        engine.generate(Request(segments=segments, max_new_tokens=8, stop_tokens=[], reuse=policy), store=store)
        for policy in policies
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


@dataclass(frozen=True, kw_only=True)
class Released:
    """A network of the released head geometry, so that every kernel serves, and its bfloat16 engine."""

    checkpoint: Path
    engine: Path


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    folder = tmp_path_factory.mktemp("released")
    options = NetworkOptions(
        seed=random.randrange(2**31), kinds="schchc", groups=2, heads_per_group=8, hidden=256, head_dim=512,
        rope_dim=64, hca=128, window=128, topk=64, index_heads=64, index_dim=128, experts=8, experts_per_token=6,
    )  # fmt: skip
    checkpoint = write_network(network(options), folder / "net")
    build = BuildOptions(dtype="bfloat16", artifact_format=ArtifactFormat.BFLOAT16, chunk_rows=512)
    return Released(checkpoint=checkpoint, engine=build_engine(checkpoint, folder / "engine", options=build))


@needs_kernels
def test_kernels_answer_like_the_references(
    released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 a random network routes near ties as rounding has it, so the kernels are held to what the references lose
    in bf16 against an fp32 engine; in chunks of few rows, and in those that memory has room for."""
    documents, question = [tokens(n) for n in (1024, 900, 1300)], tokens(60)
    kernels = [
        answers(
            Engine.open(released.engine, device="cuda", chunk_rows=rows), ArtifactStore(tmp_path / f"kernels-{rows}"),
            documents, question,
        )
        for rows in (512, None)
    ]  # fmt: skip
    monkeypatch.setattr("trt_redknot.engine.loading.CudaOps", lambda collectives, geometry: ReferenceOps(collectives))
    plain = Engine.open(released.engine, device="cuda", chunk_rows=512)
    narrow = answers(plain, ArtifactStore(tmp_path / "refs"), documents, question)
    wide = build_engine(released.checkpoint, tmp_path / "wide", options=BuildOptions(chunk_rows=512))
    exact = answers(Engine.open(wide, device="cuda"), ArtifactStore(tmp_path / "exact"), documents, question)

    def lost(responses: list[Response]) -> float:
        pairs = zip(exact, responses, strict=True)
        return sum(kl_divergence(a.first_logits.cpu(), b.first_logits.cpu()) for a, b in pairs) / len(exact)

    for found in kernels:
        assert all(response.first_logits.isfinite().all() for response in found)
        assert [r.report.rows.total for r in found] == [r.report.rows.total for r in exact]
        assert lost(found) < 2 * lost(narrow) + 0.03, f"kernels {lost(found)}, references in bf16 {lost(narrow)}"


@needs_kernels
@pytest.mark.parametrize(
    "tiles", [TileOptions(depth=0), TileOptions(depth=3), TileOptions(depth=3, device_bytes=1 << 30)],
    ids=["read in place", "ring", "device tier"],
)  # fmt: skip
def test_a_prefill_never_waits_for_the_gpu(
    released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiles: TileOptions
) -> None:
    """torch raises for every copy that waits. Artifacts that are read in place are copied from pageable memory: there
    it is the recompute arm that must not wait."""
    engine = Engine.open(released.engine, device="cuda", tiles=tiles, chunk_rows=512)
    store = ArtifactStore(tmp_path / "store")
    documents, question = [tokens(n) for n in (1024, 900, 1300)], tokens(60)
    expected = answers(engine, store, documents, question)
    if tiles.device_bytes:
        for document in documents:
            engine.warm(store, engine.build_artifact(store, document))
    run = Prefill.run
    stepped = []

    def strict(self: Prefill) -> Steps[Prefilled]:
        steps = run(self)
        while True:
            torch.cuda.set_sync_debug_mode("error")
            try:
                next(steps)
            except StopIteration as end:
                prefilled: Prefilled = end.value
                return prefilled
            finally:
                torch.cuda.set_sync_debug_mode("default")
            stepped.append(self)
            yield

    monkeypatch.setattr(Prefill, "run", strict)
    again = answers(engine, store, documents, question, POLICIES if tiles.depth else POLICIES[:1])
    assert stepped
    for one, two in zip(expected, again, strict=False):
        torch.testing.assert_close(one.first_logits, two.first_logits, atol=0.05, rtol=0.05)


def test_what_waits_raises() -> None:
    """The test above can fail."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_kernels
def test_replayed_steps_answer_like_eager_ones(released: Released) -> None:
    """Steps that finish windows of both kinds, alone and beside another sequence, and over rope tables that moved."""
    engine = Engine.open(released.engine, device="cuda", chunk_rows=512)
    steps = 2 * 128 + 3 * 4
    requests = [Request(segments=[Tokens(tokens(n))], max_new_tokens=steps) for n in (700, 260)]
    admitted = [engine.admit(request, None) for request in requests]
    size = PoolRows.sum([Generation.size(engine.geometry, item) for item in admitted])
    with torch.inference_mode():
        states = []
        pools = []
        for _ in range(2):
            generation = engine.open_generation(size)
            running = [generation.begin(item) for item in admitted]
            for each in running:
                drain(generation.prefill(each))
            states.append([each.state for each in running])
            pools.append(generation.pool)
        eager = Decoder(engine._context, pools[0], graphs=False)
        graphs = Decoder(engine._context, pools[1])
        assert graphs.eager_because is None
        for step in range(steps):
            batch = slice(0, 2) if step % 16 > 11 else slice(0, 1)
            new = tokens(2)[batch]
            one = eager.step(states[0][batch], new)
            two = graphs.step(states[1][batch], new)
            assert graphs.eager_because is None
            assert float((one - two).norm() / one.norm()) < 0.02, f"step {step}"
            if step == steps // 2:
                assert graphs.captured > 1
                engine._ropes.grow(20_000)
        assert graphs.captured > 1


@needs_kernels
def test_tokens_chosen_on_the_device_are_the_best_ones(released: Released) -> None:
    """Windows of both kinds end, requests join and reach their limits at other times, and rope tables move. Each
    request is then run alone over its tokens, step by step: every next one is the best, or as good as rounding."""
    engine = Engine.open(released.engine, device="cuda", chunk_rows=512)
    joins, limits = (0, 1, 30), (160, 40, 50)
    requests = [
        Request(segments=[Tokens(tokens(n))], max_new_tokens=limit, stop_tokens=[])
        for n, limit in zip((700, 260, 400), limits, strict=True)
    ]
    admitted = [engine.admit(request, None) for request in requests]
    size = PoolRows.sum([Generation.size(engine.geometry, item) for item in admitted])
    with torch.inference_mode():
        generation = engine.open_generation(size)
        running = []
        for turn in range(200):
            if turn in joins:
                running.append(generation.begin(admitted[len(running)]))
                drain(generation.prefill(running[-1]))
            if turn == 60:
                engine._ropes.grow(40_000)
            if unfinished := [each for each in running if not each.done]:
                generation.decode(unfinished)
        assert [len(each.tokens) for each in running] == list(limits)
        for each, item in zip(running, admitted, strict=True):
            alone = engine.open_generation(Generation.size(engine.geometry, item))
            again = alone.begin(item)
            drain(alone.prefill(again))
            assert again.tokens == each.tokens[:1]
            decoder = Decoder(engine._context, alone.pool)
            worse = 0
            for token, chosen in pairwise(each.tokens):
                logits = decoder.step([again.state], [token])[0]
                worse += float(logits.max() - logits[chosen]) > 0.15 * float(logits.std())
            # Routers may flip where a row runs in other company.
            assert worse <= len(each.tokens) // 10, f"{worse} of {len(each.tokens)} tokens"


@needs_kernels
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why(
    released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.open(released.engine, device="cuda", chunk_rows=512)
    request = Request(segments=[Tokens(tokens(300))], max_new_tokens=6, stop_tokens=[])
    expected = engine.generate(request)
    waiting = CudaOps.shared_expert

    def waits(self: CudaOps, x: torch.Tensor, *args: torch.Tensor, limit: float) -> torch.Tensor:
        x.sum().item()
        return waiting(self, x, *args, limit=limit)

    monkeypatch.setattr(CudaOps, "shared_expert", waits)
    refusals = []
    queue = Decoder.queue

    def noted(self: Decoder, *args: Any) -> QueuedStep:
        step = queue(self, *args)
        refusals.append(self.eager_because)
        return step

    monkeypatch.setattr(Decoder, "queue", noted)
    assert engine.generate(request).tokens == expected.tokens
    assert refusals[0] is None
    assert refusals[-1] is not None
    assert "captured" in refusals[-1]


@pytest.mark.parametrize("form", [ArtifactFormat.BFLOAT16, ArtifactFormat.FP8])
def test_parts_leave_the_gpu_as_they_were_when_they_were_taken(form: ArtifactFormat) -> None:
    """The producer's memory is used again at once, and copies are still on their way."""
    copies, width = HostCopies(), 512
    codec = TensorCodec(part=Part.LATENTS, format=form, width=width, rope_dim=64)
    begun, expected = [], []
    for seed in range(6):
        latents = torch.randn((20_000, width), generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        expected.append(codec.encode(latents).cpu())
        torch.cuda._sleep(2_000_000)
        begun.append(copies.begin(codec.encode(latents)))
        latents.fill_(float("nan"))
        del latents
    for copy, wanted in zip(begun, expected, strict=True):
        assert copy.wait().is_pinned()
        assert torch.equal(copy.wait(), wanted)


class HeldUp(CudaLane):
    """The copies of a layer wait for a kernel that does nothing for many milliseconds."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(50_000_000)
        super().copy(targets, sources)


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
