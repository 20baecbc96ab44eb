"""One rank is made to differ, in every way there is a reason for: all ranks fall back together, with that reason."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.admission.support import DOCUMENTS, Scene, make_scene
from tests.artifacts.support import GEOMETRY, PROFILE, build_on_ranks, identity, part_values
from trt_redknot.admission import Admission, FallbackReason
from trt_redknot.artifacts import ArtifactFormat, ArtifactStore, Part, artifact_parts
from trt_redknot.artifacts.files import Files
from trt_redknot.config.profile import SplitProfile

OTHER_PROFILE = SplitProfile.model_validate({**PROFILE.model_dump(), "trailing_fence": PROFILE.trailing_fence + 1})


def own_group(scene: Scene) -> Path:
    return scene.file(1, f"rank-{scene.odd:04d}/group-000.safetensors")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x10
    path.write_bytes(raw)


def edit_token(scene: Scene) -> None:
    path = scene.file(0, "tokens.safetensors")
    tokens = load_file(path)["tokens"].clone()
    tokens[4] = (tokens[4] + 1) % 512
    save_file({"tokens": tokens}, path)


def swap_certificates(scene: Scene) -> None:
    one, two = scene.file(0, "certificate.json"), scene.file(1, "certificate.json")
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)


def rebuild_own(scene: Scene, *, size: int | None = None, seed: int = 0) -> None:
    shutil.rmtree(scene.own)
    for document in DOCUMENTS:
        build_on_ranks(scene.own, document, size or scene.size, seed=seed)


def newer_for_the_others(scene: Scene) -> None:
    build_on_ranks(scene.shared, DOCUMENTS[1], scene.size, rebuild=True)


def renumbered(scene: Scene) -> None:
    folder = scene.file(0, "certificate.json").parent
    folder.rename(folder.with_name("gen-00000002"))


class SlowFiles(Files):
    """Reading takes its time: seconds pass on the test's clock with every chunk."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.now += 1.0
        return super().read_into(fd, buffer, offset)


def slow(scene: Scene) -> None:
    disk = SlowFiles()
    scene.others = {"clock": disk.clock, "deadline_s": 25.0, "store": ArtifactStore(scene.own, files=disk)}


class BrokenFiles(Files):
    """Opening a common file fails as the operating system might."""

    def __init__(self, code: int) -> None:
        self.code = code

    def open_beneath(self, folder: int, parts: object, flags: int) -> int:
        parts = list(parts)  # type: ignore[call-overload]
        if parts[0] == "common":
            raise OSError(self.code, os.strerror(self.code))
        return super().open_beneath(folder, parts, flags)


def broken(code: int) -> Callable[[Scene], None]:
    return lambda scene: scene.others.update(store=ArtifactStore(scene.own, files=BrokenFiles(code)))


DIFFERENCES: dict[str, tuple[Callable[[Scene], object], FallbackReason]] = {
    "artifact removed": (lambda s: ArtifactStore(s.own).rm(s.ids[0]), FallbackReason.MISSING_ARTIFACT),
    "certificate deleted": (lambda s: s.file(0, "certificate.json").unlink(), FallbackReason.MISSING_ARTIFACT),
    "store removed": (lambda s: shutil.rmtree(s.own), FallbackReason.MISSING_ARTIFACT),
    "file deleted": (lambda s: own_group(s).unlink(), FallbackReason.MISSING_LAYER),
    "common file deleted": (
        lambda s: s.file(0, "common/group-001.safetensors").unlink(),
        FallbackReason.MISSING_LAYER,
    ),
    "streams deleted": (lambda s: s.file(0, "common/streams.safetensors").unlink(), FallbackReason.CORRUPT_FILE),
    "file truncated": (
        lambda s: os.truncate(own_group(s), own_group(s).stat().st_size - 1),
        FallbackReason.CORRUPT_FILE,
    ),
    "file emptied": (lambda s: os.truncate(own_group(s), 0), FallbackReason.CORRUPT_FILE),
    "one bit flipped": (lambda s: flip(own_group(s)), FallbackReason.CORRUPT_FILE),
    "one bit of a certificate flipped": (
        lambda s: flip(s.file(1, "certificate.json")),
        FallbackReason.CORRUPT_FILE,
    ),
    "read error": (broken(errno.EIO), FallbackReason.CORRUPT_FILE),
    "out of descriptors": (broken(errno.EMFILE), FallbackReason.CAPACITY),
    "out of memory": (broken(errno.ENOMEM), FallbackReason.CAPACITY),
    "no room, says the engine": (
        lambda s: s.others.update(refusal=(FallbackReason.CAPACITY, "the cache is full")),
        FallbackReason.CAPACITY,
    ),
    "edited token": (edit_token, FallbackReason.TOKEN_MISMATCH),
    "certificates swapped": (swap_certificates, FallbackReason.TOKEN_MISMATCH),
    "other checkpoint": (
        lambda s: s.others.update(identity=identity(checkpoint="b" * 64)),
        FallbackReason.CHECKPOINT_MISMATCH,
    ),
    "other profile": (
        lambda s: s.others.update(profile=OTHER_PROFILE, identity=identity(profile=OTHER_PROFILE)),
        FallbackReason.PROFILE_MISMATCH,
    ),
    "other format": (
        lambda s: s.others.update(identity=identity(ArtifactFormat.FP8)),
        FallbackReason.PROFILE_MISMATCH,
    ),
    "other TP size": (
        lambda s: rebuild_own(s, size=1 if s.size > 1 else 2),
        FallbackReason.INCOMPATIBLE_TP_GEOMETRY,
    ),
    "stale generation": (newer_for_the_others, FallbackReason.STALE_GENERATION),
    "renumbered generation": (renumbered, FallbackReason.STALE_GENERATION),
    "slow rank": (slow, FallbackReason.TIMEOUT),
    "other values": (lambda s: rebuild_own(s, seed=5), FallbackReason.RANK_DISAGREEMENT),
}


def check_fallback(scene: Scene, results: list[Admission | BaseException], reason: FallbackReason) -> None:
    for result in results:
        assert isinstance(result, Admission), result
        assert result.reason is reason, result.detail
        assert not result.admitted
        assert result.detail == results[0].detail  # type: ignore[union-attr]
        assert [document.lease for document in result.documents] == [None, None]
        assert [document.tokens.tolist() for document in result.documents] == list(DOCUMENTS)
    assert scene.exchanges == [2] * scene.size
    assert not scene.leased()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("case", DIFFERENCES)
def test_one_differing_rank_makes_all_fall_back_alike(tmp_path: Path, case: str, size: int) -> None:
    change, reason = DIFFERENCES[case]
    scene = make_scene(tmp_path, size, change)
    check_fallback(scene, scene.run(), reason)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_unanimity_admits_with_one_exchange(tmp_path: Path, size: int) -> None:
    scene = make_scene(tmp_path, size)
    results = scene.run()
    assert scene.leased()
    for rank, result in enumerate(results):
        assert isinstance(result, Admission), result
        assert result.admitted
        assert result.detail is None
        assert [document.tokens.tolist() for document in result.documents] == list(DOCUMENTS)
        assert [document.lease.rank for document in result.documents if document.lease] == [rank, rank]
        result.close()
    assert scene.exchanges == [1] * size
    assert not scene.leased()


def test_every_reason_has_a_test() -> None:
    assert {reason for _, reason in DIFFERENCES.values()} == set(FallbackReason)


def test_the_first_reason_in_order_counts(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 4, lambda s: flip(own_group(s)))
    scene.others = {"refusal": (FallbackReason.CAPACITY, "full")}
    check_fallback(scene, scene.run(), FallbackReason.CORRUPT_FILE)
    # Quarantine took the corrupt document away, so the next request finds it missing there.
    check_fallback(scene, scene.run(), FallbackReason.MISSING_ARTIFACT)


def test_what_is_corrupt_is_quarantined_on_its_own_side_only(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 2, lambda s: flip(own_group(s)))
    check_fallback(scene, scene.run(), FallbackReason.CORRUPT_FILE)
    assert ArtifactStore(scene.own).stat().quarantined == 1
    assert ArtifactStore(scene.own).stat().artifacts == 1
    assert ArtifactStore(scene.shared).stat().artifacts == 2


def test_what_merely_does_not_fit_stays(tmp_path: Path) -> None:
    for case in ("other checkpoint", "other TP size", "slow rank", "out of descriptors"):
        scene = make_scene(tmp_path / case.replace(" ", "-"), 2, DIFFERENCES[case][0])
        check_fallback(scene, scene.run(), DIFFERENCES[case][1])
        assert ArtifactStore(scene.own).stat().quarantined == 0


def test_a_corrupt_shared_artifact_is_quarantined_although_all_ranks_had_it_open(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 4)
    path = scene.shared / "default" / scene.ids[0] / "gen-00000001" / "common" / "streams.safetensors"
    flip(path)
    check_fallback(scene, scene.run(), FallbackReason.CORRUPT_FILE)
    assert ArtifactStore(scene.shared).stat().quarantined == 1
    # Its tokens are still found, so the next request is answered too.
    check_fallback(scene, scene.run(), FallbackReason.MISSING_ARTIFACT)


def test_admitted_leases_read_this_ranks_values(tmp_path: Path) -> None:
    scene = make_scene(tmp_path, 2)
    (spec,) = (
        spec
        for spec in artifact_parts(GEOMETRY, PROFILE, len(DOCUMENTS[1]), 2)
        if spec.part is Part.LOCAL and spec.layer == 2
    )
    for rank, result in enumerate(scene.run()):
        assert isinstance(result, Admission)
        lease = result.documents[1].lease
        assert lease is not None
        assert torch.equal(lease.tensor(spec.part, spec.layer), part_values(spec, rank))
        result.close()
