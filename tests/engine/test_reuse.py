"""What reuse may and may not change in an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.engine.conftest import Bench, UnsyncedFiles
from tests.support.networks import NetworkOptions, fp64, open_network
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.lease import Lease
from trt_redknot.engine.ropes import RopeTables
from trt_redknot.errors import RequestError, StoreError

# The engines compute in fp64: what is equal by construction is equal to rounding.
TOLERANCE = 1e-8


def ask(bench: Bench, segments: list[Any], reuse: ReusePolicy | None, steps: int = 1) -> Response:
    return bench.engine.generate(
        Request(segments=segments, max_new_tokens=steps, stop_tokens=[], reuse=reuse), store=bench.store
    )


def assert_same(left: Response, right: Response) -> None:
    torch.testing.assert_close(left.first_logits, right.first_logits, atol=TOLERANCE, rtol=0)
    assert left.tokens == right.tokens


def test_protect_all_with_aligned_lengths_is_recomputation(bench: Bench) -> None:
    documents = [bench.tokens(n) for n in (128, 256, 128)]
    segments = [*(Artifact(bench.engine.build_artifact(bench.store, d)) for d in documents), Tokens(bench.tokens(37))]
    recomputed = ask(bench, segments, None, steps=32)
    protected = ask(bench, segments, ReusePolicy(protect="all"), steps=32)
    assert protected.report.admitted
    assert protected.report.rows.protected == protected.report.rows.total == 549
    assert recomputed.report.arm == "recompute"
    assert_same(protected, recomputed)


@pytest.mark.parametrize("length", [128, 256])
@pytest.mark.parametrize("epilogue", ["full", "active"])
def test_a_prefix_is_lossless_with_all_its_rows_omitted(bench: Bench, length: int, epilogue: str) -> None:
    document, question = bench.tokens(length), bench.tokens(random.randrange(1, 60))
    artifact = Artifact(bench.engine.build_artifact(bench.store, document))
    reused = ask(bench, [artifact, Tokens(question)], ReusePolicy(tau=1.0, epilogue=epilogue), steps=20)  # type: ignore[arg-type]
    assert reused.report.rows.omitted == reused.report.rows.prefix == length
    assert reused.report.ledgers.token_rows.share == pytest.approx(length / (length + len(question)))
    assert_same(reused, ask(bench, [Tokens(document + question)], None, steps=20))


def test_every_document_length_works_as_an_exact_prefix(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lengths 1 to 300, partial windows of both kinds: the stored prefix answers like the same segments recomputed.

    Every length is asked; a random half of those above three of the coarsest windows is recomputed beside it.
    """
    directory = tmp_path_factory.mktemp("lengths")
    options = NetworkOptions(
        kinds="chc", hca=32, seed=random.randrange(2**31), experts=4, experts_per_token=3, heads_per_group=2
    )
    _, engine = open_network(directory, options, build=fp64())
    store = ArtifactStore(directory / "store", files=UnsyncedFiles())
    bench = Bench(model=None, engine=engine, store=store, directory=directory)  # type: ignore[arg-type]
    tokens, question = bench.tokens(300), Tokens(bench.tokens(9))
    for length in range(1, 301):
        segments = [Artifact(engine.build_artifact(bench.store, tokens[:length])), question]
        stored = ask(bench, segments, ReusePolicy(tau=1.0))
        assert stored.report.rows.prefix == length
        assert stored.first_logits.isfinite().all()
        if length > 3 * options.hca and random.random() < 0.5:
            continue
        recomputed = ask(bench, segments, ReusePolicy(protect="all"))
        assert (stored.first_logits - recomputed.first_logits).abs().max() <= TOLERANCE, f"length {length}"


def test_documents_of_any_length_anywhere(bench: Bench) -> None:
    """Odd lengths, one-token documents, the same document twice, fresh tokens between: an answer, every row counted."""
    lengths = [1, 2, 3, 5, 63, 127, 129, 200]
    random.shuffle(lengths)
    made = {n: bench.engine.build_artifact(bench.store, bench.tokens(n)) for n in lengths}
    segments = [*(Artifact(made[n]) for n in lengths), Tokens([5]), Artifact(made[63]), Tokens(bench.tokens(11))]
    for policy in (
        ReusePolicy(boundary=8, tail=0, top_entries=3, budget=0.2),
        ReusePolicy(boundary=0, tail=0, top_entries=0, budget=0.0),
        ReusePolicy(boundary=0, tail=0, top_entries=0, budget=1.0),
        ReusePolicy(boundary=4, tail=0, top_entries=0, budget=0.5, epilogue="active"),
        ReusePolicy(protect="all"),
    ):
        response = ask(bench, segments, policy, steps=6)
        assert response.first_logits.isfinite().all(), policy
        rows = response.report.rows
        assert rows.total == sum(lengths) + 1 + 63 + 11
        assert len(response.tokens) == 6


def test_a_request_that_ends_with_a_document(bench: Bench) -> None:
    """The query rows are the document's last window; generated tokens start a fresh segment."""
    documents = [bench.tokens(128), bench.tokens(256)]
    segments: list[Any] = [Artifact(bench.engine.build_artifact(bench.store, d)) for d in documents]
    recomputed = ask(bench, segments, None, steps=20)
    assert_same(ask(bench, segments, ReusePolicy(protect="all"), steps=20), recomputed)
    alone = ask(bench, segments[:1], ReusePolicy(tau=1.0), steps=20)
    assert alone.report.rows.protected == 4
    assert_same(alone, ask(bench, segments[:1], None, steps=20))
    for length in (1, 3, 6, 130):
        odd = [Artifact(bench.engine.build_artifact(bench.store, bench.tokens(length)))]
        assert_same(
            ask(bench, odd, ReusePolicy(tau=1.0), steps=9), ask(bench, odd, ReusePolicy(protect="all"), steps=9)
        )


def test_shuffled_documents_change_the_answer_like_recomputation(bench: Bench) -> None:
    documents = [Artifact(bench.engine.build_artifact(bench.store, bench.tokens(128))) for _ in range(3)]
    question = Tokens(bench.tokens(20))
    answers = []
    for order in ([0, 1, 2], [2, 0, 1]):
        segments = [*(documents[i] for i in order), question]
        protected = ask(bench, segments, ReusePolicy(protect="all"), steps=8)
        assert_same(protected, ask(bench, segments, None, steps=8))
        answers.append(protected.first_logits)
    assert (answers[0] - answers[1]).abs().max() > 10 * TOLERANCE


def test_cached_local_values_of_protected_rows_are_never_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in every cached Local value changes nothing as long as no row is active; with active rows it is seen."""
    segments = [Artifact(bench.engine.build_artifact(bench.store, bench.tokens(128))) for _ in range(2)]
    segments.append(Tokens(bench.tokens(9)))  # type: ignore[arg-type]
    everything, some = ReusePolicy(protect="all"), ReusePolicy(boundary=4, tail=0, top_entries=2, budget=0.5)
    clean, clean_active = ask(bench, segments, everything), ask(bench, segments, some)
    original = Lease.rows

    def poisoned(
        self: Lease, part: Part, layer: int | None, row_index: torch.Tensor, dtype: Any = None
    ) -> torch.Tensor:
        values = original(self, part, layer, row_index, dtype)
        return torch.full_like(values, float("nan")) if part is Part.LOCAL else values

    monkeypatch.setattr(Lease, "rows", poisoned)
    assert torch.equal(ask(bench, segments, everything).first_logits, clean.first_logits)
    omit = ReusePolicy(boundary=4, tail=0, top_entries=2, budget=0.0)
    assert ask(bench, segments, omit).first_logits.isfinite().all()
    assert clean_active.report.rows.active > 0
    assert ask(bench, segments, some).first_logits.isnan().all()


@pytest.mark.parametrize("epilogue", ["full", "active"])
def test_of_documents_whose_rows_all_run_nothing_is_read(
    bench: Bench, epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (bench.engine.build_artifact(bench.store, bench.tokens(length)) for length in (70, 50))
    read: set[tuple[str, Part]] = set()
    original = Lease.tensor

    def watched(self: Lease, part: Part, layer: int | None, dtype: Any = None) -> torch.Tensor:
        read.add((self.artifact_id, part))
        return original(self, part, layer, dtype)

    monkeypatch.setattr(Lease, "tensor", watched)
    policy = ReusePolicy(boundary=50, tail=0, epilogue=epilogue)  # type: ignore[arg-type]
    response = ask(bench, [Artifact(first), Artifact(second), Tokens([1])], policy)
    assert response.report.rows.omitted == response.report.rows.prefix == 70
    assert read == {(first, Part.LATENTS), (first, Part.ENTRIES), (first, Part.INDEX_KEYS)}


def test_no_row_sees_the_future(bench: Bench) -> None:
    """Another end of the request leaves every latent before it as it was, in every layer."""
    from trt_redknot.engine.pool import CachePool
    from trt_redknot.engine.prefill import Prefilled

    documents = [bench.tokens(n) for n in (70, 130)]
    artifacts = [Artifact(bench.engine.build_artifact(bench.store, d)) for d in documents]
    common = bench.tokens(30)
    pools: list[CachePool] = []
    import trt_redknot.engine.generate as generate

    original = generate.Prefill

    class Watched(original):  # type: ignore[misc,valid-type]
        def run(self) -> Prefilled:
            pools.append(self._pool)
            return super().run()  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "Prefill", Watched)
        for end in ([3] * 21, [4] * 21):
            ask(bench, [*artifacts, Tokens(common + end)], ReusePolicy(protect="all"))
    before = 230
    for left, right in zip(pools[0].latents, pools[1].latents, strict=True):
        torch.testing.assert_close(left[:before], right[:before], atol=1e-6, rtol=0)
        assert (left[before + 1] - right[before + 1]).abs().max() > 0


def test_edits_are_dirty_rows(bench: Bench) -> None:
    document = bench.tokens(256)
    artifact_id = bench.engine.build_artifact(bench.store, document)
    before = Artifact(bench.engine.build_artifact(bench.store, bench.tokens(128)))
    new = (document[77] + 1) % 97
    segments = [before, Artifact(artifact_id, edits={77: new}), Tokens(bench.tokens(9))]
    edited = [*document[:77], new, *document[78:]]
    protected = ask(bench, segments, ReusePolicy(protect="all"), steps=8)
    plain = [before, Artifact(bench.engine.build_artifact(bench.store, edited)), segments[2]]
    assert_same(protected, ask(bench, plain, None, steps=8))
    policy = ReusePolicy(boundary=4, tail=0, top_entries=0, budget=0.0)
    dirty = ask(bench, segments, policy)
    assert set(dirty.plan.classes[128 + 76 : 128 + 80].tolist()) == {0}
    assert dirty.report.rows.protected == ask(bench, plain, policy).report.rows.protected + 4
    first = ask(bench, [segments[1], segments[2]], ReusePolicy(protect="all"), steps=8)
    assert_same(first, ask(bench, [Tokens(edited + list(segments[2].ids))], None, steps=8))  # type: ignore[union-attr]


def test_fallback_without_tokens_is_an_error_and_with_tokens_an_answer(bench: Bench) -> None:
    document = bench.tokens(40)
    missing = bench.store.artifact_id(document, bench.engine.identity)
    with pytest.raises(StoreError, match="no rank can read the tokens"):
        ask(bench, [Artifact(missing), Tokens([1])], ReusePolicy())
    with pytest.raises(StoreError, match="no rank can read the tokens"):
        ask(bench, [Artifact(missing), Tokens([1])], None)
    answered = ask(bench, [Artifact(missing, tokens=document), Tokens([1])], ReusePolicy(), steps=5)
    assert answered.report.fallback_reason == "missing_artifact"
    assert answered.report.arm == "recompute"
    assert_same(answered, ask(bench, [Tokens([*document, 1])], None, steps=5))
    assert_same(ask(bench, [Artifact(missing, tokens=document), Tokens([1])], None, steps=5), answered)


def test_a_request_that_memory_does_not_reach_for_keeps_no_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact_id = bench.engine.build_artifact(bench.store, bench.tokens(20))

    def grow(tables: RopeTables, positions: int) -> None:
        raise MemoryError

    monkeypatch.setattr(RopeTables, "grow", grow)
    with pytest.raises(MemoryError) as failure:
        ask(bench, [Artifact(artifact_id), Tokens([1])], ReusePolicy())
    # Whoever holds the exception holds what its frames hold.
    assert failure.value is not None
    assert not any(listed.leased for listed in bench.store.inspect(artifact_id))


def test_bad_documents(bench: Bench) -> None:
    with pytest.raises(RequestError):
        bench.engine.build_artifact(bench.store, [])
    with pytest.raises(RequestError, match="vocabulary"):
        bench.engine.build_artifact(bench.store, [1, 97])
    with pytest.raises(RequestError, match="no store"):
        bench.engine.generate(Request(segments=[Artifact("0" * 32)]))
    with pytest.raises(RequestError, match="too long"):
        bench.engine.build_artifact(bench.store, [1] * 9000)
    assert bench.store.ls() == []


def test_artifacts_are_found_again_and_rebuilt_on_demand(bench: Bench) -> None:
    document = bench.tokens(50)
    first = bench.engine.build_artifact(bench.store, document)
    assert bench.engine.build_artifact(bench.store, document) == first
    assert [listed.published.generation for listed in bench.store.inspect(first)] == [1]
    assert bench.engine.build_artifact(bench.store, document, rebuild=True) == first
    assert max(listed.published.generation for listed in bench.store.inspect(first)) == 2


def test_fanout_shrinks_with_tau(bench: Bench) -> None:
    segments = [Artifact(bench.engine.build_artifact(bench.store, bench.tokens(128))), Tokens(bench.tokens(60))]

    def experts(tau: float) -> float:
        histogram = ask(bench, segments, ReusePolicy(tau=tau)).report.k_histogram
        return sum(k * count for k, count in enumerate(histogram)) / sum(histogram)

    means = [experts(tau) for tau in (0.5, 0.8, 0.9, 1.0)]
    assert means == sorted(means)
    assert means[0] == 3.0
    assert means[-1] == 4.0


def test_reuse_needs_fences_that_leave_a_middle(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Networks without a CSA layer, or without a leading one, or with nothing to reuse."""
    for kinds in ("hhhhhhhh", "ssssssss", "hhhcccch", "cc", "s", "shc"):
        directory = tmp_path_factory.mktemp("kinds")
        _, engine = open_network(
            directory, NetworkOptions(kinds=kinds, seed=random.randrange(2**31), hash_layers=1), build=fp64()
        )
        bench = Bench(model=None, engine=engine, store=ArtifactStore(directory / "store"), directory=directory)  # type: ignore[arg-type]
        documents = [Artifact(engine.build_artifact(bench.store, bench.tokens(128))) for _ in range(2)]
        segments = [*documents, Tokens(bench.tokens(7))]
        assert_same(ask(bench, segments, ReusePolicy(protect="all"), 4), ask(bench, segments, None, 4))
        reused = ask(bench, segments, ReusePolicy(boundary=8, tail=0, top_entries=1, budget=0.25), 4)
        assert reused.first_logits.isfinite().all(), kinds
        assert reused.report.rows.omitted > 0


def test_the_public_surface_is_importable() -> None:
    import trt_redknot

    assert Engine is trt_redknot.Engine
    for name in ("Engine", "ArtifactStore", "Request", "Artifact", "Tokens", "ReusePolicy"):
        assert hasattr(trt_redknot, name)
