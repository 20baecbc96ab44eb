"""Engines answer by plans as by ops: the recorded networks of the plans against the torch backend, in both arms."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.job import make_engine, start
from tests.engine.ranks.scenario import Scenario, answer_all, make_scenario
from tests.support.plan_engine import VOCAB, load_for_plans, write_plan_network
from tests.support.plans import PACKED
from trt_redknot import ArtifactStore
from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine import engine as engine_module
from trt_redknot.engine.cache_rows import CacheRows
from trt_redknot.engine.executor import OpsExecutor
from trt_redknot.engine.tensorrt.platform import Platform
from trt_redknot.engine.tensorrt.profiles import Phase
from trt_redknot.model.layers import Projected
from trt_redknot.ops.reference.packing import pack_rows, unpack_rows

# In fp64 padding changes nothing but the order in which a matrix product is cut.
TOLERANCE = 1e-8
JOB_TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A network on disk, questions, and what the torch backend answers."""

    checkpoint: Path
    seed: int
    scenario: Scenario
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder, seed = tmp_path_factory.mktemp("reference"), random.randrange(2**31)
    checkpoint = write_plan_network(folder / "checkpoint", seed)
    scenario = make_scenario(seed, VOCAB)
    # A single row; a request that omits rows to the end; a batch of both arms that is decoded together.
    scenario["batches"] = [scenario["batches"][index] for index in (0, 3, 5)]
    engine = make_engine(checkpoint, folder / "engine", None, chunk_rows=1000)
    answers = answer_all(engine, ArtifactStore(folder / "store"), scenario)
    return Reference(checkpoint=checkpoint, seed=seed, scenario=scenario, answers=answers)


def assert_same(reference: Reference, found: list[dict[str, Any]], where: str) -> None:
    for number, (wanted, answer) in enumerate(zip(reference.answers, found, strict=True)):
        place = f"answer {number}, seed {reference.seed}, {where}"
        error = (torch.tensor(wanted["logits"]) - torch.tensor(answer["logits"])).abs().max()
        assert float(error) <= TOLERANCE, place
        for key in ("tokens", "arm", "classes", "histogram"):
            assert wanted[key] == answer[key], f"{key} of {place}"


def test_plans_answer_like_ops(reference: Reference, platform: Platform, tmp_path: Path) -> None:
    """Both arms, documents made by plans, chunks with rows of one class or of both, decoding of several sequences."""
    chunk_rows = random.randrange(6, 30)
    make_engine(reference.checkpoint, tmp_path / "engine", None, chunk_rows=chunk_rows)
    files = load_for_plans(tmp_path / "engine", None)
    interpreter = files.interpreter(platform)
    found = answer_all(files.engine(interpreter), ArtifactStore(tmp_path / "store"), reference.scenario)
    assert {answer["arm"] for answer in found} == {"reuse", "recompute"}
    assert {row for answer in found for row in answer["classes"]} == {0, 1, 2}
    assert_same(reference, found, f"{chunk_rows} rows a chunk")
    plans = {spec.kind.name for spec in interpreter.specs}
    assert {name for name, _ in interpreter.runs} == plans
    assert {name for name, phase in interpreter.runs if phase is Phase.DECODE} == plans


def test_plans_of_two_ranks_answer_like_ops_of_one(reference: Reference, tmp_path: Path) -> None:
    """Odd chunks, of which ranks own unequally many rows; of a chunk of one row one rank owns none."""
    # The single row, and the batch of both arms.
    single, _, batch = reference.scenario["batches"]
    scenario = {**reference.scenario, "batches": [single, batch]}
    answers = [reference.answers[0], *reference.answers[2:]]
    chunk_rows = random.randrange(12, 20)
    task = {"checkpoint": str(reference.checkpoint), "chunk_rows": chunk_rows, "scenario": scenario}
    finished = start(2, "plan_answers", tmp_path, task, timeout_s=JOB_TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    found = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
    assert len({own["digest"] for own in found["ranks"]}) == 1, "the ranks answer differently"
    assert found["ranks"][0]["runs"] == found["ranks"][1]["runs"], "the ranks met in other plans"
    assert_same(dataclasses.replace(reference, answers=answers), found["answers"], f"{chunk_rows} rows a chunk")


class Rounded(OpsExecutor):
    """Ops over caches that hold what packed FP8 rows can."""

    def __init__(self, geometry: ModelGeometry, *given: Any) -> None:
        super().__init__(geometry, *given)
        self._cache = CacheRows(geometry=geometry, dtype=torch.float64, packed=True)

    def _round(self, part: Part, rows: torch.Tensor) -> torch.Tensor:
        return self._cache.values(part, self._cache.stored(part, rows))

    def project(self, *given: Any) -> Projected:
        own = super().project(*given)
        return dataclasses.replace(own, latent=self._round(Part.LATENTS, own.latent))

    def compress(self, spec: Any, raw: Any, table: Any, entries: torch.Tensor, index_keys: torch.Tensor | None) -> None:
        super().compress(spec, raw, table, entries, index_keys)
        entries[table.entries] = self._round(Part.ENTRIES, entries[table.entries])
        if index_keys is not None:
            index_keys[table.entries] = self._round(Part.INDEX_KEYS, index_keys[table.entries])

    def turn(self, attention: AttentionKind, rows: torch.Tensor, frames: torch.Tensor) -> None:
        super().turn(attention, rows, frames)
        index_keys = rows.shape[1] == self._geometry.index_dim
        rows[:] = self._round(Part.INDEX_KEYS if index_keys else Part.LATENTS, rows)

    def attend(self, *given: Any, tap: Any = None) -> torch.Tensor:
        *most, restored = given
        rows = unpack_rows(pack_rows(restored), restored.shape[1], torch.float64)
        return super().attend(*most, rows, tap=tap)


def test_packed_plans_answer_like_ops_over_rounded_caches(
    reference: Reference, platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of packed FP8 rows, filled by plans and from artifacts, read by plans, the controller and the producer."""
    make_engine(reference.checkpoint, tmp_path / "engine", None, chunk_rows=24)
    files = load_for_plans(tmp_path / "engine", None, PACKED)
    found = answer_all(
        files.engine(files.interpreter(platform)), ArtifactStore(tmp_path / "packed"), reference.scenario
    )
    monkeypatch.setattr(engine_module, "stages_for", lambda *given: Rounded(*given[:-1]))
    engine = make_engine(reference.checkpoint, tmp_path / "rounded", None, chunk_rows=1000)
    wanted = answer_all(engine, ArtifactStore(tmp_path / "store"), reference.scenario)
    assert_same(dataclasses.replace(reference, answers=wanted), found, "packed")
    apart = torch.tensor(wanted[-1]["logits"]) - torch.tensor(reference.answers[-1]["logits"])
    assert float(apart.abs().max()) > TOLERANCE
