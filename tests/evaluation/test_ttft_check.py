"""The bench's check of its own arms: it passes what only rounds otherwise, and finds every kind of fault."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.networks import NetworkOptions, network_config
from trt_redknot.artifacts.contents import Part, PartSpec
from trt_redknot.cli.output import Output
from trt_redknot.collectives import LocalCollectives
from trt_redknot.config.geometry import RouterKind
from trt_redknot.config.parse import load_geometry
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.evaluation.kept import KeptArtifact
from trt_redknot.evaluation.standin import StandInRank, make_rank
from trt_redknot.evaluation.ttft_check import Agreement, Apart, Distance, SegmentAgreement, check_arms, checked_geometry
from trt_redknot.evaluation.ttft_report import print_check
from trt_redknot.launch import run_ranks
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.ops.tables import AttentionTable

# Documents of one HCA window each, and a question of 256.
LENGTH, DOCUMENTS = 2 * 128 + 256, 2
CHUNKS = (1000, 200)
LAYERS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("geometry")
    network_config(NetworkOptions(kinds="schchcs", hca=128)).save_pretrained(folder)
    return folder


def rank_of(folder: Path, routers: RouterKind, dtype: torch.dtype) -> StandInRank:
    geometry = checked_geometry(load_geometry(folder), routers, layers=LAYERS, experts=8, vocab=97)
    return make_rank(
        geometry, LocalCollectives(), chunk_rows=LENGTH, length=LENGTH, dtype=dtype, device=torch.device("cpu"),
        tiles=TileOptions(depth=0),
    )  # fmt: skip


def over(rank: StandInRank, ops: ReferenceOps) -> StandInRank:
    """The same rank over other ops."""
    other = dataclasses.replace(rank, context=dataclasses.replace(rank.context, ops=ops))
    return dataclasses.replace(rank, context=other.moved(0))


@pytest.mark.parametrize("routers", RouterKind)
def test_arms_that_only_round_otherwise_agree(folder: Path, routers: RouterKind) -> None:
    rank = rank_of(folder, routers, torch.bfloat16)
    with torch.inference_mode():
        found = check_arms(rank, LENGTH, DOCUMENTS, runs=2, chunks=CHUNKS)
    assert found.faults() == []
    assert found.equal == 1
    assert [segment.rows for segment in found.segments] == [128, 128, 256]
    # There is rounding to compare with, and it is rounding.
    assert all(1e-4 < segment.recomputed.rms < 0.3 for segment in found.segments)
    # And rows that have nothing to do with each other are far apart.
    assert all(1.0 < segment.unrelated.rms < 1.8 for segment in found.segments)
    assert found.to_json()["faults"] == []


def test_a_network_is_gone_when_its_check_is_over(folder: Path) -> None:
    """Without the garbage collector, which may come late: rows of a chunk are as many as there is memory free for."""
    gc.collect()
    gc.disable()
    try:
        rank = rank_of(folder, RouterKind.HASH, torch.float32)
        weight = weakref.ref(rank.layers[0]["experts.down"])
        with torch.inference_mode():
            check_arms(rank, LENGTH, DOCUMENTS, runs=1, chunks=(LENGTH,))
        assert weight() is not None
        del rank
        assert weight() is None
    finally:
        gc.enable()


def test_two_ranks_that_share_a_network_and_its_artifacts_agree(folder: Path) -> None:
    script = Path(__file__).parent / "ranks" / "checking.py"
    finished = run_ranks(2, [str(script), str(folder), str(LENGTH), str(DOCUMENTS)], timeout_s=200)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert found["ranks"] == 2
    assert found["faults"] == []
    assert found["reused"]["protected"]["rms"] < 1e-4


# Of a prompt: recomputed, protected, recomputed elsewhere, its artifact made, behind the artifact.
WALKS, PROTECTED = 5, 1


class Broken(ReferenceOps):
    """One thing wrong in one layer, where documents are protected. A layer's rows are one chunk."""

    layer = 3

    def __init__(self) -> None:
        super().__init__(LocalCollectives())
        self._layer = -1

    def rotated(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def seen(self, table: AttentionTable) -> AttentionTable:
        return table

    def local(self, out: torch.Tensor) -> torch.Tensor:
        return out

    def restored(self, state: torch.Tensor) -> torch.Tensor:
        return state

    def norm_rope_pack(self, latents: Any, norm: Any, rope: Any, positions: Any, *, eps: float) -> Any:
        self._layer += 1
        return super().norm_rope_pack(latents, norm, rope, self._if_broken(self.rotated, positions), eps=eps)

    def seg_latent_attention(self, q_global: Any, q_local: Any, table: Any, *args: Any, **options: Any) -> Any:
        table = self._if_broken(self.seen, table)
        out_global, out_local = super().seg_latent_attention(q_global, q_local, table, *args, **options)
        return out_global, self._if_broken(self.local, out_local)

    def restore_replace(self, own: Any, local: Any, restored: Any) -> Any:
        return self._if_broken(self.restored, super().restore_replace(own, local, restored))

    def _if_broken(self, change: Callable[[Any], Any], value: Any) -> Any:
        walk, layer = divmod(self._layer, LAYERS)
        return change(value) if walk % WALKS == PROTECTED and layer == self.layer else value


class ShiftedRope(Broken):
    """One document's latents are rotated by one position too many."""

    def rotated(self, positions: torch.Tensor) -> torch.Tensor:
        moved = positions.clone()
        moved[128:256] += 1
        return moved


class EntrySeenLate(Broken):
    """Compressed entries become visible one too late."""

    layer = 4

    def seen(self, table: AttentionTable) -> AttentionTable:
        return dataclasses.replace(table, visible=(table.visible - 1).clamp(min=0))


class StaleHead(Broken):
    """One Local head of the rows of one document is another token's."""

    def local(self, out: torch.Tensor) -> torch.Tensor:
        stale = out.clone()
        stale[128:256, 2] = out[:128, 2]
        return stale


class StaleRow(Broken):
    """One row's projected state is another row's."""

    def restored(self, state: torch.Tensor) -> torch.Tensor:
        stale = state.clone()
        stale[300] = state[10]
        return stale


@pytest.mark.parametrize(("fault", "touched"), [(ShiftedRope, 1), (EntrySeenLate, 0), (StaleHead, 1), (StaleRow, 2)])
def test_one_fault_in_one_layer_is_found(folder: Path, fault: type[Broken], touched: int) -> None:
    rank = rank_of(folder, RouterKind.HASH, torch.float32)
    broken = over(rank, fault())
    with torch.inference_mode():
        assert check_arms(rank, LENGTH, DOCUMENTS, runs=1, chunks=(LENGTH,)).faults() == []
        found = check_arms(broken, LENGTH, DOCUMENTS, runs=1, chunks=(LENGTH,))
    assert any(f"segment {touched}: rms" in line for line in found.faults())
    assert any(f"segment {touched}: largest" in line for line in found.faults())
    assert any("of the protected rows are recomputation bit for bit" in line for line in found.faults())
    assert 0 < found.equal < 1


def test_a_stale_head_stands_out_of_the_rounding_of_bfloat16(folder: Path) -> None:
    rank = rank_of(folder, RouterKind.HASH, torch.bfloat16)
    broken = over(rank, StaleHead())
    with torch.inference_mode():
        found = check_arms(broken, LENGTH, DOCUMENTS, runs=2, chunks=(LENGTH,))
    assert any("segment 1: rms" in line for line in found.faults())


@pytest.mark.parametrize(("part", "layer"), [(Part.BOUNDARY, 3), (Part.ENTRIES, 3), (Part.LATENTS, 6)])
def test_a_stale_part_of_an_artifact_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: Part, layer: int
) -> None:
    add = KeptArtifact.add

    def stale(kept: KeptArtifact, spec: PartSpec, tensor: torch.Tensor) -> None:
        add(kept, spec, tensor.flip(0) if (spec.part, spec.layer) == (part, layer) else tensor)

    monkeypatch.setattr(KeptArtifact, "add", stale)
    rank = rank_of(folder, RouterKind.HASH, torch.float32)
    with torch.inference_mode():
        found = check_arms(rank, LENGTH, DOCUMENTS, runs=1, chunks=(LENGTH,))
    faults = found.faults()
    assert faults
    assert all("reuse" in line for line in faults)


UNRELATED = Distance(rms=1.4, largest=1.5)


def agreement(distances: Sequence[tuple[Distance, Distance]], unrelated: Distance = UNRELATED) -> Agreement:
    segments = tuple(
        SegmentAgreement(rows=1, protected=one, recomputed=two, unrelated=unrelated) for one, two in distances
    )
    return Agreement(routers=RouterKind.HASH, runs=1, equal=1.0, segments=segments, reused=segments[0])


def test_what_is_no_number_is_a_fault() -> None:
    apart = Apart()
    apart.add(torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2))
    lost = apart.distance()
    near, far = Distance(rms=0.1, largest=0.2), Distance(rms=0.2, largest=0.4)
    assert agreement([(near, far)]).faults() == []
    assert len(agreement([(near, far), (lost, far), (near, lost)]).faults()) == 4
    assert len(agreement([(lost, far)]).faults()) == 4


@pytest.mark.parametrize(
    ("rounding", "found"),
    [
        (Distance(rms=0.71, largest=0.9), ["recomputations differ by 7.10e-01 (rms), more than 50% of"]),
        (Distance(rms=0.1, largest=1.13), ["recomputations differ by 1.13e+00 (largest), more than 80% of"]),
        (Distance(rms=0.69, largest=1.11), []),
    ],
)
def test_a_bound_that_proves_nothing_is_a_fault(rounding: Distance, found: list[str]) -> None:
    """However small the distances are that it would bound."""
    near = Distance(rms=1e-3, largest=1e-3)
    faults = agreement([(near, Distance(rms=0.1, largest=0.2)), (near, rounding)]).faults()
    assert len(faults) == len(found)
    assert all(line.startswith(f"hash routers, segment 1: {want}") for line, want in zip(faults, found, strict=True))
    assert all("unrelated rows differ by (1.40e+00): nothing" in line for line in faults)


def test_no_bound_is_above_what_unrelated_rows_allow() -> None:
    """Twice the largest distance of recomputations would let a row be another's."""
    near, rounding = Distance(rms=0.1, largest=0.1), Distance(rms=0.2, largest=1.0)
    assert agreement([(near, rounding), (Distance(rms=0.1, largest=1.1), rounding)]).faults() == []
    faults = agreement([(near, rounding), (Distance(rms=0.1, largest=1.4), rounding)]).faults()
    assert len(faults) == 1
    assert "segment 1: largest distance 1.40e+00, more than 1.12e+00" in faults[0]


def test_a_protected_row_that_is_nearly_recomputation_is_a_fault() -> None:
    distance = Distance(rms=0.1, largest=0.1)
    found = dataclasses.replace(agreement([(distance, distance)]), equal=0.9995)
    assert found.faults() == [
        "hash routers: 99.95% of the protected rows are recomputation bit for bit, expected all of them"
    ]


def test_distances_are_of_rows_and_of_all() -> None:
    found, wanted = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    apart = Apart()
    for row in range(2):
        apart.add(found[row : row + 1], wanted[row : row + 1])
    distance = apart.distance()
    assert distance.rms == pytest.approx((1 / 26) ** 0.5)
    assert distance.largest == pytest.approx(1.0)


def test_the_check_is_shown() -> None:
    shown, noted = StringIO(), StringIO()
    lost = Distance(rms=float("nan"), largest=0.2)
    run = {"check": [agreement([(lost, Distance(rms=0.1, largest=0.2))]).to_json()]}
    print_check(Output(0, stdout=shown, stderr=noted), run)
    assert "0.10000" in shown.getvalue()
    assert "segment 0: rms distance nan" in noted.getvalue()
