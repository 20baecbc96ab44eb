"""The store: what ranks build together is what each of them reads; who may read it; what a bad folder gives."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.artifacts.support import (
    GEOMETRY,
    PROFILE,
    build_artifact,
    build_on_ranks,
    identity,
    part_values,
    together,
)
from trt_redknot.artifacts import ArtifactError, ArtifactFault, ArtifactFormat, ArtifactStore, Part, artifact_parts
from trt_redknot.artifacts.identity import TpGeometry
from trt_redknot.artifacts.layout import plan_files
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import CollectiveError, RequestError, StoreError

TOKENS = list(range(37))


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 70), st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(ArtifactFormat)), st.integers(0, 99))
def test_every_rank_reads_what_was_built(
    tmp_path: Path, length: int, size: int, form: ArtifactFormat, seed: int
) -> None:
    tokens = np.random.default_rng(seed).integers(0, GEOMETRY.vocab, length).tolist()
    root = tmp_path / f"{length}-{size}-{form}-{seed}"
    artifact_id = build_on_ranks(root, tokens, size, who=identity(form), seed=seed)
    store = ArtifactStore(root)
    for rank in range(size):
        with store.open(artifact_id, rank=rank) as lease:
            assert lease.tokens().tolist() == tokens
            assert lease.certificate.layers == tuple(range(GEOMETRY.layers))
            for spec in artifact_parts(GEOMETRY, PROFILE, length, size):
                whole = lease.tensor(spec.part, spec.layer, torch.float32)
                wanted = part_values(spec, rank, seed)
                assert whole.shape == wanted.shape
                if form is ArtifactFormat.FP8 and spec.part not in (Part.STREAMS, Part.BOUNDARY, Part.SALIENCE):
                    assert ((whole - wanted).abs() <= wanted.abs() / 16 + 0.01).all()
                else:
                    # The values have bf16 precision, so both other formats keep every bit of them.
                    assert torch.equal(whole, wanted)
                index = torch.from_numpy(np.random.default_rng(seed).integers(0, spec.shape[0], 7))
                assert torch.equal(lease.rows(spec.part, spec.layer, index, torch.float32), whole[index])
    assert all(verdict.sound for verdict in store.verify())


def test_exact_formats_keep_every_bit(tmp_path: Path) -> None:
    spec = next(s for s in artifact_parts(GEOMETRY, PROFILE, 3, 1) if s.part is Part.LATENTS)
    for form, dtype in ((ArtifactFormat.FLOAT32, torch.float32), (ArtifactFormat.BFLOAT16, torch.bfloat16)):
        assert ArtifactFormat.exact_for(dtype) is form
        values = torch.randn(spec.shape).to(dtype)
        values[0, 0], values[1, 1], values[2, 2] = float("nan"), float("inf"), -0.0
        store = ArtifactStore(tmp_path / form)
        who = identity(form)
        with store.begin(
            [1, 2, 3], identity=who, geometry=GEOMETRY, profile=PROFILE, collectives=LocalCollectives()
        ) as build:
            for each in build.specs:
                build.add(each, values if each == spec else part_values(each, 0))
            artifact_id = build.publish()
        with store.open(artifact_id, rank=0) as lease:
            kept = lease.tensor(spec.part, spec.layer)
            assert kept.dtype is dtype
            assert torch.equal(kept.view(torch.uint8), values.view(torch.uint8))


def test_the_caller_keeps_its_tensors(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.begin(
        TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LocalCollectives()
    ) as build:
        for spec in build.specs:
            values = part_values(spec, 0)
            build.add(spec, values)
            values.fill_(-1.0)
        artifact_id = build.publish()
    with store.open(artifact_id, rank=0) as lease:
        spec = artifact_parts(GEOMETRY, PROFILE, len(TOKENS), 1)[0]
        assert torch.equal(lease.tensor(spec.part, spec.layer), part_values(spec, 0))


def test_groups_are_written_as_they_complete(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.begin(
        TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LocalCollectives()
    ) as build:
        plans = plan_files(GEOMETRY, PROFILE, tokens=len(TOKENS), tp_size=1, form=ArtifactFormat.FLOAT32)
        for plan in plans:
            for spec in plan.specs:
                before = len(list(tmp_path.rglob("*.safetensors")))
                build.add(spec, part_values(spec, 0))
            if plan.specs:
                assert len(list(tmp_path.rglob("*.safetensors"))) == before + 1
        build.publish()


def test_the_preflight_size_is_exact(tmp_path: Path) -> None:
    for size in (1, 2):
        artifact_id = build_on_ranks(tmp_path / str(size), TOKENS, size)
        (listed,) = ArtifactStore(tmp_path / str(size)).ls()
        exact = listed.published.bytes
        fits = ArtifactStore(tmp_path / f"{size}-fits", capacity_bytes=exact)
        tight = ArtifactStore(tmp_path / f"{size}-tight", capacity_bytes=exact - 1)
        if size == 1:
            assert build_artifact(fits, TOKENS, LocalCollectives()) == artifact_id
            with pytest.raises(StoreError, match=f"{exact} bytes"):
                build_artifact(tight, TOKENS, LocalCollectives())
            assert not list((tmp_path / f"{size}-tight").rglob("*.safetensors"))


def test_what_exists_is_found_and_not_built_again(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, TOKENS, LocalCollectives())
    tp = TpGeometry.even(GEOMETRY, 1)
    found = store.find(artifact_id, identity=identity(), tp=tp)
    assert found is not None
    assert found.generation == 1
    with store.begin(
        TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LocalCollectives()
    ) as build:
        assert build.exists
        assert build.publish() == artifact_id
    assert store.find(artifact_id, identity=identity(checkpoint="b" * 64), tp=tp) is None
    assert store.find(artifact_id, identity=identity(), tp=TpGeometry.even(GEOMETRY, 2)) is None
    assert [listed.published.generation for listed in store.ls()] == [1]


def test_a_rebuild_is_the_next_generation_and_readers_take_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, TOKENS, LocalCollectives(), seed=1)
    with store.open(artifact_id, rank=0) as old:
        assert build_artifact(store, TOKENS, LocalCollectives(), seed=2, rebuild=True) == artifact_id
        spec = artifact_parts(GEOMETRY, PROFILE, len(TOKENS), 1)[0]
        with store.open(artifact_id, rank=0) as new:
            assert (old.generation, new.generation) == (1, 2)
            assert torch.equal(old.tensor(spec.part, spec.layer), part_values(spec, 0, 1))
            assert torch.equal(new.tensor(spec.part, spec.layer), part_values(spec, 0, 2))
        with store.open(artifact_id, generation=1) as again:
            assert again.generation == 1
        with pytest.raises(ArtifactError, match="generation 7"):
            store.open(artifact_id, generation=7)


def test_another_rank_count_makes_another_generation(tmp_path: Path) -> None:
    one, two = build_on_ranks(tmp_path, TOKENS, 1), build_on_ranks(tmp_path, TOKENS, 2)
    assert one == two
    with ArtifactStore(tmp_path).open(two) as lease:
        assert (lease.generation, lease.certificate.tp_size) == (2, 2)


def test_what_lost_a_file_is_built_again(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, TOKENS, LocalCollectives())
    next(tmp_path.rglob("streams.safetensors")).unlink()
    assert build_artifact(store, TOKENS, LocalCollectives()) == artifact_id
    with store.open(artifact_id, rank=0) as lease:
        assert lease.generation == 2


def test_namespaces_never_meet(tmp_path: Path) -> None:
    mine, yours = ArtifactStore(tmp_path, namespace="mine"), ArtifactStore(tmp_path, namespace="yours")
    artifact_id = build_artifact(mine, TOKENS, LocalCollectives())
    assert yours.artifact_id(TOKENS, identity()) != artifact_id
    assert yours.ls() == []
    with pytest.raises(ArtifactError, match="no artifact"):
        yours.open(artifact_id)
    # A copy by hand does not help: the certificate says whose it is.
    (tmp_path / "yours").mkdir()
    (tmp_path / "mine" / artifact_id).rename(tmp_path / "yours" / artifact_id)
    with pytest.raises(ArtifactError, match="another artifact") as caught:
        yours.open(artifact_id)
    assert caught.value.fault is ArtifactFault.CERTIFICATE_MISPLACED
    assert yours.read_tokens(artifact_id, identity()) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", ".hidden", "a" * 65, "a\n", "ä", "a b"])
def test_bad_namespaces_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="namespace"):
        ArtifactStore(tmp_path, namespace=name)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a folder"):
        ArtifactStore(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be locked"):
        build_artifact(ArtifactStore(tmp_path / "file" / "below"), TOKENS, LocalCollectives())
    with pytest.raises(StoreError, match="capacity"):
        ArtifactStore(tmp_path, capacity_bytes=0)


def test_opening_what_is_not_there_creates_nothing(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    for artifact_id in ("0" * 32, "../../etc", "", "X" * 32):
        with pytest.raises(ArtifactError) as caught:
            store.open(artifact_id)
        assert caught.value.fault is ArtifactFault.MISSING
    assert store.ls() == []
    assert store.stat().artifacts == 0
    assert store.gc().orphans.folders == 0
    assert not (tmp_path / "store").exists()
    with pytest.raises(StoreError, match="no artifact store"):
        store.require()


@pytest.mark.parametrize("tokens", [[], [GEOMETRY.vocab], [-1], [[1, 2]], ["a"], [1.5]])
def test_bad_documents_are_refused_on_all_ranks(tmp_path: Path, tokens: list[object]) -> None:
    results = together(2, lambda ranks: build_artifact(ArtifactStore(tmp_path), tokens, ranks))  # type: ignore[arg-type]
    assert [type(result) for result in results] == [RequestError, RequestError]
    assert not (tmp_path / "default").exists()


def test_ranks_with_different_documents_are_told(tmp_path: Path) -> None:
    results = together(2, lambda ranks: build_artifact(ArtifactStore(tmp_path), [1, 2 + ranks.rank], ranks))
    assert [type(result) for result in results] == [CollectiveError, CollectiveError]
    store = ArtifactStore(tmp_path)
    assert store.ls() == []
    assert store.stat().reserved_bytes == 0


def test_leaving_without_publish_removes_everything(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    with store.begin(
        TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LocalCollectives()
    ) as build:
        for spec in build.specs:
            build.add(spec, part_values(spec, 0))
    assert store.ls() == []
    assert not list(tmp_path.rglob("*.safetensors"))
    assert build_artifact(store, TOKENS, LocalCollectives()) == build.artifact_id


def test_an_incomplete_build_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(ranks: LocalCollectives) -> str:
        store = ArtifactStore(tmp_path)
        with store.begin(TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=ranks) as build:
            for spec in build.specs:
                if (spec.by_rank or ranks.rank == 0) and not (ranks.rank == 1 and spec.layer == 3):
                    build.add(spec, part_values(spec, ranks.rank))
            return build.publish()

    results = together(4, work)
    assert all(isinstance(result, StoreError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert "rank 1" in str(results[0])
    assert "layers.3.local" in str(results[0])
    assert ArtifactStore(tmp_path).ls() == []


def test_a_failure_told_by_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    def work(ranks: LocalCollectives) -> str:
        with ArtifactStore(tmp_path).begin(
            TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=ranks
        ) as build:
            if ranks.rank == 2:
                build.fail(RequestError("this rank has had enough"))
            for spec in build.specs:
                if spec.by_rank or ranks.rank == 0:
                    build.add(spec, part_values(spec, ranks.rank))
            return build.publish()

    results = together(4, work)
    assert [type(result) for result in results] == [RequestError] * 4
    assert {str(result) for result in results} == {"rank 2: this rank has had enough"}
    assert ArtifactStore(tmp_path).ls() == []


def test_misuse_of_a_build_is_told(tmp_path: Path) -> None:
    with ArtifactStore(tmp_path).begin(
        TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=LocalCollectives()
    ) as build:
        spec = build.specs[0]
        with pytest.raises(ValueError, match="found"):
            build.add(spec, torch.zeros(1, 1))
        build.add(spec, part_values(spec, 0))
        with pytest.raises(ValueError, match="before"):
            build.add(spec, part_values(spec, 0))


def test_a_common_part_may_come_from_any_one_rank(tmp_path: Path) -> None:
    def work(ranks: LocalCollectives, twice: bool) -> str:
        with ArtifactStore(tmp_path).begin(
            TOKENS, identity=identity(), geometry=GEOMETRY, profile=PROFILE, collectives=ranks, rebuild=True
        ) as build:
            for spec in build.specs:
                if spec.by_rank or ranks.rank == 1 or (twice and spec.layer is None):
                    build.add(spec, part_values(spec, ranks.rank))
            return build.publish()

    assert len(set(together(2, lambda ranks: work(ranks, False)))) == 1
    results = together(2, lambda ranks: work(ranks, True))
    assert all(isinstance(result, StoreError) and "two ranks" in str(result) for result in results), results


def test_rows_outside_the_tensor_are_refused(tmp_path: Path) -> None:
    artifact_id = build_on_ranks(tmp_path, TOKENS, 1)
    with ArtifactStore(tmp_path).open(artifact_id, rank=0) as lease:
        for index in (-1, len(TOKENS)):
            with pytest.raises(IndexError):
                lease.rows(Part.LATENTS, 0, torch.tensor([0, index]))
        assert lease.rows(Part.LATENTS, 0, torch.tensor([], dtype=torch.int64)).shape == (0, GEOMETRY.head_dim)
    with ArtifactStore(tmp_path).open(artifact_id) as lease, pytest.raises(ValueError, match="rank"):
        lease.tensor(Part.LOCAL, 2)


def test_tensors_outlive_the_lease_and_the_artifact(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, TOKENS, LocalCollectives())
    spec = artifact_parts(GEOMETRY, PROFILE, len(TOKENS), 1)[0]
    with store.open(artifact_id, rank=0) as lease:
        tensor = lease.tensor(spec.part, spec.layer)
    store.rm(artifact_id)
    assert torch.equal(tensor, part_values(spec, 0))


def test_leases_do_not_hold_files_open(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    artifact_id = build_artifact(store, TOKENS, LocalCollectives())
    before = len(os.listdir("/proc/self/fd"))
    leases = [store.open(artifact_id, rank=0) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * len(leases)
    for lease in leases:
        lease.close()
    assert len(os.listdir("/proc/self/fd")) == before
