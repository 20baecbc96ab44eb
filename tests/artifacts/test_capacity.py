"""Room: least recently used goes first, pinned and leased stay, refusals name the numbers, running builds count."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, identity
from trt_redknot.artifacts import ArtifactError, ArtifactStore
from trt_redknot.artifacts.lease import Lease
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import CapacityError

LOCAL = LocalCollectives()


def document(number: int) -> list[int]:
    return [number] * 20


def size_of_one(root: Path) -> int:
    store = ArtifactStore(root)
    build_artifact(store, document(0), LOCAL)
    return store.ls()[0].published.bytes


def used_at(store: ArtifactStore, artifact_id: str, seconds: float) -> None:
    (listed,) = store.inspect(artifact_id)
    os.utime(listed.published.path / "lease.lock", (seconds, seconds))


def present(store: ArtifactStore) -> set[str]:
    return {listed.published.artifact_id for listed in store.ls()}


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    store = ArtifactStore(tmp_path / "store", capacity_bytes=3 * one)
    ids = [build_artifact(store, document(number), LOCAL) for number in range(3)]
    for number, artifact_id in enumerate(ids):
        used_at(store, artifact_id, 1000.0 + number)
    store.open(ids[0]).close()
    ids.append(build_artifact(store, document(3), LOCAL))
    assert present(store) == {ids[0], ids[2], ids[3]}


def test_superseded_generations_go_before_anything_else(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    store = ArtifactStore(tmp_path / "store", capacity_bytes=3 * one)
    first, second = (build_artifact(store, document(number), LOCAL) for number in range(2))
    used_at(store, first, 1.0)
    build_artifact(store, document(1), LOCAL, rebuild=True)
    third = build_artifact(store, document(2), LOCAL)
    assert present(store) == {first, second, third}
    assert [each.published.generation for each in store.inspect(second)] == [2]


def test_pinned_and_leased_stay_and_the_refusal_names_the_numbers(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    store = ArtifactStore(tmp_path / "store", capacity_bytes=2 * one + 1)
    pinned, leased = (build_artifact(store, document(number), LOCAL) for number in range(2))
    store.pin(pinned)
    with store.open(leased, rank=0):
        with pytest.raises(CapacityError) as caught:
            build_artifact(store, document(2), LOCAL)
        numbers = {int(number) for number in re.findall(r"\d+", str(caught.value))}
        assert {one, 2 * one, 2 * one + 1} <= numbers
        assert present(store) == {pinned, leased}
    third = build_artifact(store, document(2), LOCAL)
    assert present(store) == {pinned, third}


def test_nothing_is_evicted_where_it_would_not_be_enough(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    store = ArtifactStore(tmp_path / "store", capacity_bytes=3 * one)
    ids = {build_artifact(store, document(number), LOCAL) for number in range(3)}
    for artifact_id in list(ids)[:2]:
        store.pin(artifact_id)
    with pytest.raises(CapacityError):
        build_artifact(store, [9] * 40, LOCAL)
    assert present(store) == ids


def test_running_builds_count(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    store = ArtifactStore(tmp_path / "store", capacity_bytes=2 * one - 1)
    who = identity()
    with store.begin(document(0), identity=who, geometry=GEOMETRY, profile=PROFILE, collectives=LOCAL):
        assert store.stat().reserved_bytes == one
        with pytest.raises(CapacityError, match=f"{one} reserved"):
            build_artifact(store, document(1), LOCAL)
    assert store.stat().reserved_bytes == 0
    build_artifact(store, document(1), LOCAL)


def test_one_tenant_never_evicts_another(tmp_path: Path) -> None:
    one = size_of_one(tmp_path / "probe")
    mine = ArtifactStore(tmp_path / "store", capacity_bytes=one, namespace="mine")
    # Names are part of the certificate; both are shorter than the probe's, so one artifact fits.
    yours = ArtifactStore(tmp_path / "store", capacity_bytes=one, namespace="yours")
    kept = build_artifact(mine, document(0), LOCAL)
    build_artifact(yours, document(0), LOCAL)
    build_artifact(yours, document(1), LOCAL)
    assert present(mine) == {kept}
    assert len(present(yours)) == 1


class StoreModel(RuleBasedStateMachine):
    """The store against a dictionary: what is there, what is pinned, what is leased."""

    root: Path
    one: int

    @initialize(room=st.integers(1, 3))
    def start(self, room: int) -> None:
        self.counter = getattr(type(self), "counter", 0) + 1
        type(self).counter = self.counter
        self.room = room
        self.store = ArtifactStore(self.root / str(self.counter), capacity_bytes=room * self.one)
        self.order: list[int] = []
        self.pinned: set[int] = set()
        self.leases: dict[int, Lease] = {}
        self.clock = 1000.0

    def identifier(self, number: int) -> str:
        return self.store.artifact_id(document(number), identity())

    def touch(self, number: int) -> None:
        self.clock += 1
        used_at(self.store, self.identifier(number), self.clock)
        if number in self.order:
            self.order.remove(number)
        self.order.append(number)

    @rule(number=st.integers(0, 5))
    def build(self, number: int) -> None:
        if number in self.order:
            assert build_artifact(self.store, document(number), LOCAL) == self.identifier(number)
            self.touch(number)
            return
        free = [each for each in self.order if each not in self.pinned and each not in self.leases]
        if len(self.order) == self.room and not free:
            with pytest.raises(CapacityError):
                build_artifact(self.store, document(number), LOCAL)
            return
        build_artifact(self.store, document(number), LOCAL)
        if len(self.order) == self.room:
            self.order.remove(free[0])
        self.touch(number)

    @rule(number=st.integers(0, 5))
    def lease(self, number: int) -> None:
        if number not in self.order:
            with pytest.raises(ArtifactError):
                self.store.open(self.identifier(number))
            return
        if number not in self.leases:
            self.leases[number] = self.store.open(self.identifier(number), rank=0)
            self.touch(number)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.sampled_from(sorted(self.leases)))).close()

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.order))
        if number in self.pinned:
            self.store.unpin(self.identifier(number))
        else:
            self.store.pin(self.identifier(number))
        self.pinned ^= {number}

    @rule(number=st.integers(0, 5))
    def remove(self, number: int) -> None:
        if number in self.order and number not in self.pinned and number not in self.leases:
            self.store.rm(self.identifier(number))
            self.order.remove(number)
            return
        with pytest.raises(Exception, match=r"no artifact|pinned|in use"):
            self.store.rm(self.identifier(number))

    @rule()
    def collect(self) -> None:
        self.store.gc()

    @rule()
    def reopen(self) -> None:
        self.store = ArtifactStore(self.store.root, capacity_bytes=self.room * self.one)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "order"):
            listed = {each.published.artifact_id: each for each in self.store.ls()}
            assert set(listed) == {self.identifier(number) for number in self.order}
            for number in self.order:
                assert listed[self.identifier(number)].published.pinned == (number in self.pinned)
                assert listed[self.identifier(number)].leased == (number in self.leases)
            assert self.store.stat().bytes <= self.room * self.one

    def teardown(self) -> None:
        for lease in getattr(self, "leases", {}).values():
            lease.close()


def test_the_store_behaves_like_its_model(tmp_path: Path) -> None:
    StoreModel.root = tmp_path / "stores"
    StoreModel.one = size_of_one(tmp_path / "probe")
    limits = settings(
        deadline=None,
        max_examples=12,
        stateful_step_count=14,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(StoreModel, settings=limits)
