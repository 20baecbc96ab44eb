"""Requests that are wrong, tokens nobody has, ranks that break: the same typed error everywhere, and nobody hangs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.admission.support import DOCUMENTS, Scene, make_scene
from tests.artifacts.support import GEOMETRY, identity, together
from trt_redknot.admission import Admission, FallbackReason
from trt_redknot.admission.recompute import document_tokens
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.artifacts.files import Files
from trt_redknot.errors import CollectiveError, RequestError, StoreError
from trt_redknot.request.request import Artifact


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), 4)


BAD_EDITS = [{len(DOCUMENTS[1]): 1}, {-1: 1}, {0: GEOMETRY.vocab}, {0: -1}, {0: "x"}, {None: 1}]


@pytest.mark.parametrize("edits", BAD_EDITS)
def test_bad_edits_are_request_errors_on_all_ranks(scene: Scene, edits: dict[int, int]) -> None:
    results = scene.run([Artifact(scene.ids[0]), Artifact(scene.ids[1], edits=edits)])
    assert [type(result) for result in results] == [RequestError] * 4
    assert len({str(result) for result in results}) == 1
    assert not scene.leased()


@pytest.mark.parametrize("tokens", [[], [GEOMETRY.vocab], [-1], ["x"], [1.5], [[1]]])
def test_bad_tokens_are_request_errors_on_all_ranks(scene: Scene, tokens: list[int]) -> None:
    results = scene.run([Artifact(scene.ids[0], tokens=tokens)])
    assert [type(result) for result in results] == [RequestError] * 4
    assert not scene.leased()


def test_good_edits_are_admitted(scene: Scene) -> None:
    results = scene.run([Artifact(scene.ids[1], edits={0: 5, len(DOCUMENTS[1]) - 1: 0})])
    for result in results:
        assert isinstance(result, Admission)
        assert result.admitted
        # Edits are the caller's to apply.
        assert result.documents[0].tokens.tolist() == DOCUMENTS[1]
        result.close()


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 1), max_size=5))
def test_any_order_and_repetition_is_admitted(scene: Scene, order: list[int]) -> None:
    results = scene.run([Artifact(scene.ids[index]) for index in order])
    for result in results:
        assert isinstance(result, Admission)
        assert result.admitted
        assert [document.tokens.tolist() for document in result.documents] == [DOCUMENTS[index] for index in order]
        result.close()
    assert scene.exchanges == [1] * 4


@pytest.mark.parametrize("artifact_id", ["0" * 32, "../../etc/passwd", "", "A" * 32])
def test_a_document_nobody_knows_is_one_error_on_all_ranks(scene: Scene, artifact_id: str) -> None:
    results = scene.run([Artifact(scene.ids[0]), Artifact(artifact_id)])
    problems = {result.problem for result in results if isinstance(result, StoreError)}
    assert problems == {f"no rank can read the tokens of artifact {artifact_id}"}, results
    assert all(isinstance(result, StoreError) for result in results), results
    assert not scene.leased()


def test_a_document_nobody_knows_is_answered_from_the_tokens_of_the_caller(scene: Scene) -> None:
    results = scene.run([Artifact(scene.ids[0]), Artifact("0" * 32, tokens=[4, 5, 6])])
    for result in results:
        assert isinstance(result, Admission)
        assert result.reason is FallbackReason.MISSING_ARTIFACT
        assert [document.tokens.tolist() for document in result.documents] == [DOCUMENTS[0], [4, 5, 6]]


def test_the_callers_tokens_count_where_they_differ(scene: Scene) -> None:
    for result in scene.run([Artifact(scene.ids[0], tokens=[4, 5, 6])]):
        assert isinstance(result, Admission)
        assert result.reason is FallbackReason.TOKEN_MISMATCH
        assert result.documents[0].tokens.tolist() == [4, 5, 6]


def test_only_one_rank_can_read_the_tokens(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 4)
    shutil.rmtree(scene.shared)
    for result in scene.run():
        assert isinstance(result, Admission), result
        assert result.reason is FallbackReason.MISSING_ARTIFACT
        assert [document.tokens.tolist() for document in result.documents] == list(DOCUMENTS)


def test_tokens_survive_a_spoiled_certificate(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 2)
    for root in (scene.shared, scene.own):
        (root / "default" / scene.ids[0] / "gen-00000001" / "certificate.json").write_text("{}")
    for result in scene.run():
        assert isinstance(result, Admission), result
        assert result.reason is FallbackReason.CORRUPT_FILE
        assert result.documents[0].tokens.tolist() == DOCUMENTS[0]


def test_ranks_with_different_requests_are_told(scene: Scene) -> None:
    for others in ([Artifact(scene.ids[0])], [Artifact(scene.ids[0]), Artifact(scene.ids[1], edits={1: 1})]):
        scene.others = {"documents": others}
        results = scene.run()
        scene.others = {}
        assert [type(result) for result in results] == [CollectiveError] * 4
        assert not scene.leased()


class BreakingFiles(Files):
    def open_beneath(self, folder: int, parts: object, flags: int) -> int:
        raise ZeroDivisionError("nobody thought of this")


def test_a_rank_that_breaks_leaves_nobody_hanging(scene: Scene) -> None:
    scene.others = {"store": ArtifactStore(scene.own, files=BreakingFiles())}
    results = scene.run()
    scene.others = {}
    assert [type(result) for result in results] == [CollectiveError] * 3 + [ZeroDivisionError]
    assert "rank 3" in str(results[0])
    assert not scene.leased()


def test_the_recompute_arm_gets_the_tokens_alone(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 4)
    shutil.rmtree(scene.shared / "default" / scene.ids[0])
    (scene.shared / "default" / scene.ids[1] / "gen-00000001" / "common" / "group-000.safetensors").unlink()

    def work(ranks, documents):  # type: ignore[no-untyped-def]
        store = ArtifactStore(scene.own if ranks.rank == 3 else scene.shared)
        return document_tokens(documents, store, identity=identity(), collectives=ranks, vocab=GEOMETRY.vocab)

    for result in together(4, lambda ranks: work(ranks, scene.requested())):
        assert not isinstance(result, BaseException), result
        assert [ids.tolist() for ids in result] == list(DOCUMENTS)
    results = together(4, lambda ranks: work(ranks, [Artifact("0" * 32)]))
    assert all(isinstance(result, StoreError) for result in results), results
    results = together(4, lambda ranks: work(ranks, [Artifact(scene.ids[1], edits={99: 1})]))
    assert [type(result) for result in results] == [RequestError] * 4
