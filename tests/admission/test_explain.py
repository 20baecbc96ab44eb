"""`explain` says what admission then does, for every document and rank, and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.admission.support import DOCUMENTS, make_scene
from tests.admission.test_reasons import DIFFERENCES
from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, build_on_ranks, identity
from trt_redknot.admission import Admission, FallbackReason
from trt_redknot.admission.explain import Explanation, explain, looking_store
from trt_redknot.artifacts import ArtifactFormat, ArtifactStore
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import ConfigError
from trt_redknot.request.request import Artifact

SIZE = 2


def told(root: Path, documents: list[Artifact], namespace: str = "default", **others: object) -> Explanation:
    expected = {"identity": identity(), "geometry": GEOMETRY, "profile": PROFILE, "tp_size": SIZE, **others}
    return explain(documents, looking_store(root, namespace), **expected)  # type: ignore[arg-type]


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(root.rglob("*"))
        if ".locks" not in path.parts
    }


# What lies in the store; differences of the engine's side and of several stores are not one store's to explain.
ON_DISK = {
    name: (change, reason)
    for name, (change, reason) in DIFFERENCES.items()
    if name not in {
        "read error", "out of descriptors", "out of memory", "no room, says the engine", "other checkpoint",
        "other profile", "other format", "stale generation", "slow rank", "other values",
    }
}  # fmt: skip


@pytest.mark.parametrize("case", ON_DISK)
def test_it_says_what_admission_does(tmp_path: Path, case: str) -> None:
    change, reason = ON_DISK[case]
    scene = make_scene(tmp_path, SIZE, change)
    before = snapshot(scene.own)
    explanation = told(scene.own, scene.requested())
    assert explanation.reason is reason, explanation
    assert not explanation.admitted
    assert snapshot(scene.own) == before
    assert not scene.leased()
    # All ranks on that store: what was said is what happens.
    scene.odd = -1
    shutil.rmtree(scene.shared)
    if scene.own.exists():
        shutil.copytree(scene.own, scene.shared)
    for result in scene.run([Artifact(i, tokens=t) for i, t in zip(scene.ids, DOCUMENTS, strict=True)]):
        assert isinstance(result, Admission), result
        assert result.reason is reason


def test_what_fits_is_said_to_fit(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, SIZE)
    steps: list[int] = []
    explanation = told(scene.shared, scene.requested(), advance=steps.append)
    assert explanation.admitted
    assert [document.fits for document in explanation.documents] == [True, True]
    assert [document.tokens for document in explanation.documents] == [len(ids) for ids in DOCUMENTS]
    assert [[each.generation for each in document.ranks] for document in explanation.documents] == [[1, 1], [1, 1]]
    assert steps == [1] * 4
    assert told(scene.shared, []).admitted


def test_a_rank_of_its_own_is_named(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, SIZE)
    (scene.file(1, "rank-0001/group-000.safetensors")).unlink()
    first, second = told(scene.own, scene.requested()).documents
    assert first.fits
    assert [each.reason for each in second.ranks] == [None, FallbackReason.MISSING_LAYER]
    assert "rank-0001/group-000" in str(second.ranks[1].detail)
    assert str(told(scene.own, scene.requested()).detail).startswith("rank 1, document 1")


def set_aside(store: ArtifactStore, artifact_id: str) -> None:
    next((store.root / "default" / artifact_id).rglob("streams.safetensors")).unlink()
    store.verify()


HINTS: dict[str, tuple[Callable[[ArtifactStore, str], object], str]] = {
    "set aside": (set_aside, r"in quarantine.*streams\.safetensors"),
    "elsewhere": (
        lambda store, artifact_id: (store.root / "default").rename(store.root / "tenant"),
        "namespace tenant",
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_hints_say_where_a_missing_artifact_went(tmp_path: Path, case: str) -> None:
    artifact_id = build_on_ranks(tmp_path, DOCUMENTS[0], SIZE)
    change, wanted = HINTS[case]
    change(ArtifactStore(tmp_path), artifact_id)
    (document,) = told(tmp_path, [Artifact(artifact_id)]).documents
    assert document.ranks[0].reason is FallbackReason.MISSING_ARTIFACT
    assert len(document.hints) == 1
    assert re.search(wanted, document.hints[0], re.DOTALL), document.hints


def test_the_same_document_for_another_engine_is_a_hint(tmp_path: Path) -> None:
    other = build_artifact(ArtifactStore(tmp_path), DOCUMENTS[0], LocalCollectives(), who=identity(ArtifactFormat.FP8))
    wanted = ArtifactStore(tmp_path).artifact_id(DOCUMENTS[0], identity())
    (document,) = told(tmp_path, [Artifact(wanted, tokens=DOCUMENTS[0])]).documents
    assert document.hints == (f"artifact {other} has the same tokens and another format",)


@pytest.mark.parametrize("artifact_id", ["../../etc", "", "0" * 32])
def test_ids_that_are_none_are_missing(tmp_path: Path, artifact_id: str) -> None:
    (document,) = told(tmp_path / "nowhere", [Artifact(artifact_id)]).documents
    assert {each.reason for each in document.ranks} == {FallbackReason.MISSING_ARTIFACT}
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("edits", [{99999: 1}, {0: GEOMETRY.vocab}, {"x": 1}])
def test_a_wrong_request_is_told_as_one(tmp_path: Path, edits: dict[int, int]) -> None:
    artifact_id = build_on_ranks(tmp_path, DOCUMENTS[0], SIZE)
    explanation = told(tmp_path, [Artifact(artifact_id, edits=edits)])
    assert explanation.documents[0].error
    assert not explanation.admitted
    assert explanation.reason is None


def test_looking_is_not_using(tmp_path: Path) -> None:
    artifact_id = build_on_ranks(tmp_path, DOCUMENTS[0], SIZE)
    lock = next(tmp_path.rglob("lease.lock"))
    os.utime(lock, (1000.0, 1000.0))
    assert told(tmp_path, [Artifact(artifact_id)]).admitted
    assert lock.stat().st_mtime == 1000.0


def test_ranks_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        told(tmp_path, [], tp_size=3)
