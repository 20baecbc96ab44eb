"""What a rank does and sees while, case by case, one random rank is made to differ.

The folder has a task.json. Every rank has a store of its own, and writes rank-<n>.json: what it saw in each case.
:mod:`tests.engine.ranks.sizes` starts it.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from mpi4py.MPI import Intracomm

from tests.engine.ranks.damage import CASES, DEADLINE_S, Case, Scene, cut
from tests.engine.ranks.job import make_engine, read_task
from tests.engine.ranks.scenario import build_documents
from trt_redknot import Artifact, ArtifactStore, Engine, Request, Response, ReusePolicy, Tokens
from trt_redknot.artifacts.files import Files
from trt_redknot.config.profile import SplitProfile
from trt_redknot.errors import EngineError

POLICY = {"boundary": 2, "tail": 4, "top_entries": 2, "budget": 0.2}
CHUNK_ROWS = 1000


class Job:
    """The stores of all engines, and this rank's view of them."""

    def __init__(self, folder: Path, task: dict[str, Any], world: Intracomm) -> None:
        self.world = world
        self.rank = self.world.Get_rank()
        self.folder = folder
        self.task = task
        checkpoint = Path(task["checkpoint"])
        self.engine = make_engine(checkpoint, folder / "engine", self.world, chunk_rows=CHUNK_ROWS)
        self.ids = self._documents("base", self.engine)
        self.foreign = self._foreign(checkpoint)
        if self.rank == 0:
            shutil.copytree(folder / "base", folder / "newer")
        self.world.Barrier()
        self.engine.build_artifact(ArtifactStore(folder / "newer"), task["documents"][1], rebuild=True)
        # A rank that is done may copy while another one still takes its part of the build away.
        self.world.Barrier()
        self.clean = self.copy("base", "clean")
        self.newer = self.copy("newer", "clean-newer")

    def _documents(self, name: str, engine: Engine) -> list[str]:
        return build_documents(engine, ArtifactStore(self.folder / name), self.task["documents"])

    def _foreign(self, checkpoint: Path) -> dict[str, tuple[Path, list[str]]]:
        """Real artifacts of the same documents by engines that differ in one thing."""
        default = SplitProfile.default(self.engine.geometry)
        profile = default.model_copy(update={"trailing_fence": default.trailing_fence + 1})
        engines = {
            "checkpoint": make_engine(
                Path(self.task["other"]), self.folder / "other", self.world, chunk_rows=CHUNK_ROWS
            ),
            "profile": make_engine(
                checkpoint, self.folder / "profile", self.world, chunk_rows=CHUNK_ROWS, profile=profile
            ),
        }
        found = {
            name: (self.folder / f"by-{name}", self._documents(f"by-{name}", made)) for name, made in engines.items()
        }
        if self.rank == 0:
            alone = make_engine(checkpoint, self.folder / "alone", None, chunk_rows=CHUNK_ROWS)
            self._documents("by-ranks", alone)
        self.world.Barrier()
        return {**found, "ranks": (self.folder / "by-ranks", self.ids)}

    def copy(self, source: str, target: str) -> Path:
        """This rank's own copy of a store."""
        place = self.folder / f"rank-{self.rank}" / target
        shutil.copytree(self.folder / source, place)
        return place

    def ask(self, store: ArtifactStore, *, steps: int = 2, policy: ReusePolicy | None) -> Response:
        segments = [*(Artifact(each) for each in self.ids), Tokens(self.task["question"])]
        request = Request(segments=segments, max_new_tokens=steps, stop_tokens=[], reuse=policy)
        return self.engine.generate(request, store=store)

    def try_case(self, name: str, case: Case, wanted: Response) -> dict[str, Any]:
        """The request while one rank differs, once more while what lasts lasts, and when all is well again."""
        draw = random.Random(f"{self.task['seed']} {name}")
        odd = draw.randrange(self.world.Get_size())
        identity, scene, clean = self.engine.identity, None, self.newer if case.newer else self.clean
        store = ArtifactStore(clean)
        if self.rank == odd:
            scene = Scene(
                store=self.copy("base", name.replace(" ", "-")), ids=self.ids, rank=self.rank, engine=self.engine,
                foreign=self.foreign, draw=draw, files=Files(),
            )  # fmt: skip
            case.change(scene)
            store = ArtifactStore(scene.store, files=scene.files)
        self.world.Barrier()
        # Only the slow rank's own deadline is short: the others may be held up by the machine's other work.
        hurried = name == "slow rank" and self.rank == odd
        policy = ReusePolicy(**POLICY, deadline_s=DEADLINE_S if hurried else 60.0)
        response = self.ask(store, policy=policy)
        again = self.ask(store, steps=1, policy=policy).report.fallback_reason if case.lasting else None
        self.engine.identity = identity
        healed = clean if scene is None or case.lasting else scene.store
        after = self.ask(ArtifactStore(healed), steps=1, policy=ReusePolicy(**POLICY, deadline_s=60.0)).report
        return {
            "odd": odd,
            "reason": response.report.fallback_reason,
            "detail": response.report.fallback_detail,
            "arm": response.report.arm,
            "admitted": response.report.admitted,
            "error": float((response.first_logits - wanted.first_logits).abs().max()),
            "same_tokens": response.tokens == wanted.tokens,
            "again": again,
            "after": [after.arm, after.fallback_reason],
        }

    def try_to_open(self, case: str) -> str:
        """What this rank is told where one random rank opens another or a damaged copy of the engine."""
        odd = random.Random(f"{self.task['seed']} {case}").randrange(self.world.Get_size())
        directory = self.folder / "engine"
        if self.rank == odd and case == "another engine":
            directory = self.folder / "other"
        elif self.rank == odd:
            directory = self.copy("engine", "damaged")
            cut(directory / f"rank-{odd:04d}" / "shared.safetensors", random.Random(self.task["seed"]))
        try:
            Engine.open(directory, self.world)
        except EngineError as error:
            return str(error)
        return "opened"


def run(folder: Path, world: Intracomm) -> None:
    job = Job(folder, read_task(folder), world)
    wanted = job.ask(ArtifactStore(job.clean), policy=None)
    clean = job.ask(ArtifactStore(job.clean), policy=ReusePolicy(**POLICY, deadline_s=60.0)).report
    seen = {name: job.try_case(name, case, wanted) for name, case in CASES.items()}
    content = {"clean": [clean.arm, clean.fallback_reason], "omitted": clean.rows.omitted, "cases": seen}
    content["opened"] = {case: job.try_to_open(case) for case in ("another engine", "damaged engine")}
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(content), encoding="utf-8")
