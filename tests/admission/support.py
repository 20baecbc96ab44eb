"""A request of two documents on N ranks, one of which may be made to differ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.artifacts.support import GEOMETRY, PROFILE, build_on_ranks, identity, together
from trt_redknot.admission import Admission, admit
from trt_redknot.artifacts import ArtifactStore
from trt_redknot.collectives import Collectives
from trt_redknot.request.request import Artifact

DOCUMENTS = ([7, 3, 500] * 9, list(range(40)))


@dataclass
class Scene:
    """Ranks share a store, except for `odd`, which has a copy of its own and may get other arguments of `admit`."""

    root: Path
    size: int
    odd: int
    ids: list[str] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)
    exchanges: list[int] = field(default_factory=list)
    stores: list[ArtifactStore] = field(default_factory=list)

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def own(self) -> Path:
        return self.root / "own"

    def file(self, document: int, name: str) -> Path:
        """A file of the odd rank's copy."""
        return self.own / "default" / self.ids[document] / "gen-00000001" / name

    def copy(self) -> None:
        shutil.copytree(self.shared, self.own)

    def requested(self) -> list[Artifact]:
        return [Artifact(artifact_id) for artifact_id in self.ids]

    def run(self, documents: Sequence[Artifact] | None = None) -> list[Admission | BaseException]:
        wanted = self.requested() if documents is None else documents
        self.exchanges = [0] * self.size
        self.stores = [ArtifactStore(self.own if rank == self.odd else self.shared) for rank in range(self.size)]

        def work(ranks: Collectives) -> Admission:
            arguments: dict[str, Any] = {
                "documents": wanted,
                "store": self.stores[ranks.rank],
                "identity": identity(),
                "geometry": GEOMETRY,
                "profile": PROFILE,
                "deadline_s": 60.0,
            }
            if ranks.rank == self.odd:
                arguments |= self.others
            try:
                return admit(arguments.pop("documents"), arguments.pop("store"), collectives=ranks, **arguments)
            finally:
                self.exchanges[ranks.rank] = getattr(ranks, "exchanges", 1)

        return together(self.size, work)

    def leased(self) -> bool:
        return any(listed.leased for root in (self.shared, self.own) for listed in ArtifactStore(root).ls())


def make_scene(root: Path, size: int, change: Callable[[Scene], object] | None = None) -> Scene:
    """Two artifacts built by `size` ranks, the last rank with a copy of the store that `change` then spoils."""
    scene = Scene(root=root, size=size, odd=size - 1)
    scene.ids = [build_on_ranks(scene.shared, document, size) for document in DOCUMENTS]
    scene.copy()
    if change is not None:
        change(scene)
    return scene
