"""Many processes on one store: readers, builders, one that evicts. What each saw is written down and added up.

Every document is built once, so that what was built, minus what was evicted or removed, is what must be there at the
end. Every value that a reader gets can be made again from the document's tokens, so that a torn read shows.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.artifacts.processes import Child
from tests.artifacts.support import GEOMETRY, PROFILE, build_artifact, part_values
from trt_redknot.artifacts import ArtifactError, ArtifactFault, ArtifactStore, artifact_parts
from trt_redknot.collectives import LocalCollectives
from trt_redknot.errors import CapacityError, StoreError
from trt_redknot.observability.events import NoEvents

LOCAL = LocalCollectives()
PINNED = 4
# How long after the end a process may still be waiting for a lock before it counts as a deadlock.
GRACE_S = 90.0
_BASE = 400


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """How many processes of each kind, for how long, in how much room (artifacts, besides the pinned ones)."""

    readers: int
    builders: int
    evictors: int
    seconds: float
    room: int = 24
    seed: int = 0


@dataclass(kw_only=True)
class Outcome:
    """Counts of what happened, and everything that must not have."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class _Diary(NoEvents):
    """One process's notes, one JSON pair a line. A killed or hanging process has written what it did."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, kind: str, text: str = "") -> None:
        self._file.write(json.dumps([kind, text]) + "\n")

    def evicted(self, artifact_id: str, generation: int, bytes: int) -> None:
        self.note("evicted", artifact_id)

    def quarantined(self, artifact_id: str, generation: int, reason: str) -> None:
        self.note("quarantined", f"{artifact_id}: {reason}")


def document(builder: int, serial: int) -> list[int]:
    """Tokens that say who built it and when."""
    return [builder, serial // _BASE, serial % _BASE] * 7


def seed_of(tokens: list[int]) -> int:
    builder, high, low = tokens[:3]
    return (builder * _BASE + high) * _BASE + low


def run(root: Path, crowd: Crowd) -> Outcome:
    """The whole crowd on a new store at `root`; its notes go to files beside it."""
    torch.set_num_threads(1)
    notes = root.parent / "notes"
    notes.mkdir()
    outcome = Outcome()
    pinned = _prepare(root, crowd)
    end = time.time() + crowd.seconds
    roles = [
        *((f"reader-{n}", _read, n) for n in range(crowd.readers)),
        *((f"builder-{n}", _build, n + 1) for n in range(crowd.builders)),
        *((f"evictor-{n}", _evict, n) for n in range(crowd.evictors)),
    ]
    children = [
        Child(lambda _, name=name, work=work, number=number: work(  # type: ignore[misc]
            root, _Diary(notes / name), pinned, end, random.Random(f"{crowd.seed} {name}"), number))
        for name, work, number in roles
    ]  # fmt: skip
    for (name, *_), child in zip(roles, children, strict=True):
        try:
            status = child.wait(max(0.0, end - time.time()) + GRACE_S)
        except AssertionError:
            outcome.problems.append(f"{name} hangs")
            continue
        if status != 0:
            outcome.problems.append(f"{name} left with {status}")
    _add_up(root, notes, pinned, outcome)
    return outcome


def _prepare(root: Path, crowd: Crowd) -> list[str]:
    store = ArtifactStore(root)
    pinned = []
    for serial in range(PINNED):
        tokens = document(0, serial)
        pinned.append(build_artifact(store, tokens, LOCAL, seed=seed_of(tokens)))
        store.pin(pinned[-1])
    one = store.stat().bytes // PINNED
    store.set_quota((PINNED + crowd.room) * one)
    return pinned


def _read(root: Path, diary: _Diary, pinned: list[str], end: float, draw: random.Random, number: int) -> None:
    kept = ArtifactStore(root, events=diary)
    while time.time() < end:
        # Now with an empty memory of what was verified, now with one that has seen the same inodes before.
        store = kept if draw.random() < 0.5 else ArtifactStore(root, events=diary)
        artifact_id = draw.choice([*pinned, *store._folder.artifact_ids()])
        try:
            with store.open(artifact_id, rank=0) as lease:
                tokens = lease.tokens().tolist()
                for spec in draw.sample(artifact_parts(GEOMETRY, PROFILE, len(tokens), 1), 3):
                    whole = torch.equal(lease.tensor(spec.part, spec.layer), part_values(spec, 0, seed_of(tokens)))
                    diary.note("read" if whole else "torn", f"{artifact_id} {spec.part} {spec.layer}")
        except ArtifactError as error:
            if error.fault is ArtifactFault.MISSING and artifact_id not in pinned:
                diary.note("missed", artifact_id)
            else:
                diary.note("refused", str(error))
        except StoreError as error:
            diary.note("refused", str(error))


def _build(root: Path, diary: _Diary, pinned: list[str], end: float, draw: random.Random, number: int) -> None:
    store, serial = ArtifactStore(root, events=diary), 0
    while time.time() < end:
        tokens = document(number, serial)
        try:
            diary.note("built", build_artifact(store, tokens, LOCAL, seed=seed_of(tokens)))
            serial += 1
        except CapacityError:
            diary.note("no room")
            time.sleep(0.01)
        except StoreError as error:
            diary.note("refused", str(error))


def _evict(root: Path, diary: _Diary, pinned: list[str], end: float, draw: random.Random, number: int) -> None:
    store = ArtifactStore(root, events=diary)
    while time.time() < end:
        present = [each for each in store._folder.artifact_ids() if each not in pinned]
        chosen = draw.choice(present) if present else pinned[0]
        try:
            match draw.randrange(8):
                case 0:
                    store.gc()
                    diary.note("collected")
                case 1 | 2:
                    for verdict in store.verify(chosen):
                        diary.note("sound" if verdict.sound else "unsound", f"{chosen} {verdict.faults}")
                case 3:
                    store.stat()
                case _ if present:
                    diary.note("removed", store.rm(chosen)[0].artifact_id)
        except StoreError as error:
            if "in use" not in str(error) and "no artifact" not in str(error):
                diary.note("refused", str(error))
        time.sleep(0.005)


def _add_up(root: Path, notes: Path, pinned: list[str], outcome: Outcome) -> None:
    names: dict[str, list[str]] = {}
    for path in notes.iterdir():
        for line in path.read_text().splitlines():
            kind, text = json.loads(line)
            outcome.counts[kind] += 1
            names.setdefault(kind, []).append(text)
    for kind in ("torn", "refused", "unsound", "quarantined"):
        outcome.problems += [f"{kind}: {text}" for text in names.get(kind, [])]
    store = ArtifactStore(root)
    store.gc()
    built, gone = set(names.get("built", [])), Counter(names.get("evicted", []) + names.get("removed", []))
    present = {listed.published.artifact_id for listed in store.ls()}
    wanted = (built - set(gone)) | set(pinned)
    outcome.problems += [f"lost: {each}" for each in wanted - present]
    outcome.problems += [f"not gone: {each}" for each in present - wanted]
    outcome.problems += [f"went twice: {each}" for each, times in gone.items() if times > 1]
    outcome.problems += [f"unsound at the end: {v.faults}" for v in store.verify(quarantine=False) if not v.sound]
    if store.stat().reserved_bytes or any((root / ".building").iterdir()) or any((root / ".trash").iterdir()):
        outcome.problems.append("remains of builds or removals")
