"""The TTFT bench on the host: what it measures adds up, what it counts is what runs, what it shows is what it measured.

No time is compared with anything: the machine's other work is in it.
"""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.networks import NetworkOptions, network_config
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.output import Output
from trt_redknot.collectives import LocalCollectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.parse import load_geometry
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.documents import Documents
from trt_redknot.engine.tiles import TileOptions
from trt_redknot.evaluation.metering import Ceilings, HostClock, MeteredOps, StageLine, Work, share_of_roofline
from trt_redknot.evaluation.standin import StandInArtifact, StandInCollectives, StandInRank, make_rank
from trt_redknot.evaluation.ttft import document_length, first_token, segment_table
from trt_redknot.evaluation.ttft_report import print_run, render_page
from trt_redknot.evaluation.ttft_run import measure_length
from trt_redknot.ops.reference.backend import ReferenceOps

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy=1e10, bf16=1e11, fp8=2e11)
LENGTH, DOCUMENTS = 800, 2


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ModelGeometry:
    folder = tmp_path_factory.mktemp("geometry")
    network_config(NetworkOptions(kinds="schchcsc", groups=2)).save_pretrained(folder)
    return load_geometry(folder)


def rank_of(geometry: ModelGeometry, size: int, *, depth: int = 0) -> StandInRank:
    collectives = LocalCollectives() if size == 1 else StandInCollectives(0, size)
    return make_rank(
        geometry, collectives, chunk_rows=300, length=LENGTH + 64, dtype=torch.float32, device=CPU,
        tiles=TileOptions(depth=depth),
    )  # fmt: skip


def artifacts_of(rank: StandInRank, form: ArtifactFormat) -> dict[int, StandInArtifact]:
    size = document_length(LENGTH, DOCUMENTS)
    return {
        index: StandInArtifact(
            rank.context.geometry, size, rank.context.local_width, form=form, place=CPU, content_digest=str(index)
        )
        for index in range(DOCUMENTS)
    }


@pytest.fixture(scope="module")
def run(geometry: ModelGeometry) -> dict[str, Any]:
    rank = rank_of(geometry, 2, depth=2)
    turns = []
    measured = measure_length(
        rank, LENGTH, DOCUMENTS, artifacts_of(rank, ArtifactFormat.FP8),
        {
            "recompute": None,
            "full": ReusePolicy(tail=64, boundary=8),
            "active": ReusePolicy(tail=64, epilogue="active"),
        },
        ceilings=CEILINGS, clock=HostClock(), repeat=2, form=ArtifactFormat.FP8, decode=2,
        turn_done=lambda: turns.append(1),
    )  # fmt: skip
    assert len(turns) == 9
    return {
        "evidence": "measured", "ranks": 2, "real_ranks": False, "experts": "same", "geometry": "tiny <&>",
        "layers": geometry.layers, "layers_of": geometry.layers + 1,
        "artifacts": {"place": "host", "format": "fp8", "read_ahead": 2}, "machine": {"gpu": "none"},
        "lengths": [{**measured, "peak_gib": 1.5, "driver_peak_gib": None}], "check": [],
    }  # fmt: skip


def test_a_run_is_json_and_adds_up(run: dict[str, Any]) -> None:
    length = json.loads(json.dumps(run))["lengths"][0]
    recompute, full = length["arms"]["recompute"], length["arms"]["full"]
    assert recompute["speedup"] == 1.0
    assert recompute["rows"]["omitted"] == 0
    assert recompute["bytes_by_tier"] == {}
    assert full["rows"]["omitted"] > 0
    assert full["bytes_by_tier"]["host"] > 0
    assert len(full["seconds"]) == len(full["late_s"]) == 2
    assert full["speedup"] == pytest.approx(recompute["ttft_s"] / full["ttft_s"])
    for arm in length["arms"].values():
        decode = arm["decode"]
        assert decode["tokens_per_s"] > 0
        assert decode["of_recompute"] == decode["tokens_per_s"] / recompute["decode"]["tokens_per_s"]
        assert decode["share_of_roofline"] == pytest.approx(decode["floor_s"] * decode["tokens_per_s"])
        assert decode["floor_s"] > 0
        assert decode["graphs"] == 0
        assert decode["eager_because"] == "there are no CUDA graphs on cpu"
        assert arm["share_of_roofline"] == pytest.approx(
            sum(min(line["floor_s"], line["seconds"]) for line in arm["stages"])
            / sum(line["seconds"] for line in arm["stages"])
        )
    cold = length["cold"]
    assert cold["bytes_of_rank"] > 0
    assert cold["in_recomputations"] == pytest.approx(cold["built_s"] / recompute["ttft_s"])
    for arm, requests in cold["break_even"].items():
        assert requests == pytest.approx(cold["built_s"] / (recompute["ttft_s"] - length["arms"][arm]["ttft_s"]))


def test_a_run_is_shown(run: dict[str, Any], tmp_path: Path) -> None:
    shown = StringIO()
    print_run(Output(0, stdout=shown, stderr=StringIO()), run)
    for word in (
        "recompute",
        "full",
        "seg_latent_attention",
        "one rank of TP=2",
        "measured",
        "nvidia-smi",
        "of recompute",
    ):
        assert word in shown.getvalue()
    page = render_page([run, run])
    assert f"tiny &lt;&amp;&gt;, {run['layers']} of {run['layers_of']} layers" in page
    assert page.count("the slowest arm decodes at") == 2
    assert page.count("<svg") == 6
    for start in range(6):
        ET.fromstring("<svg" + page.split("<svg")[start + 1].split("</svg>")[0] + "</svg>")


def test_metering_counts_what_runs(geometry: ModelGeometry) -> None:
    """Arithmetic of the ops against the counts of the ledgers' own model of a recomputation."""
    rank = rank_of(geometry, 1)
    context, meter = rank.metered(HostClock())
    plain = first_token(rank.context, segment_table(300, 1, reuse=False), {}, None)
    metered = first_token(context, segment_table(300, 1, reuse=False), {}, None)
    assert torch.equal(plain.logits, metered.logits)
    by_op = {line.op: line for line in meter.lines(CEILINGS)}
    g = geometry
    pairs = 300 * g.layers * g.experts_per_token
    assert by_op["experts"].operations == 2 * 3 * g.hidden * g.expert_width * pairs
    assert by_op["shared_expert"].operations == 2 * 3 * g.hidden * g.expert_width * 300 * g.layers
    assert by_op["route_learned"].calls + by_op["route_hash"].calls == g.layers
    assert by_op["split_heads"].bytes == 0
    assert all(line.seconds > 0 and line.calls > 0 for line in by_op.values())


def test_a_prefill_that_fails_stops_reading_its_artifacts(
    geometry: ModelGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(ReferenceOps):
        def norm_rope_pack(self, *_: Any, **__: Any) -> Any:
            raise FloatingPointError

    closed: list[Documents] = []
    close = Documents.close

    def note(documents: Documents) -> None:
        closed.append(documents)
        close(documents)

    monkeypatch.setattr(Documents, "close", note)
    rank = rank_of(geometry, 1)
    context = dataclasses.replace(rank.context, ops=Failing(LocalCollectives()))
    failing, _ = dataclasses.replace(rank, context=context).metered(HostClock())
    with pytest.raises(FloatingPointError):
        first_token(failing, segment_table(300, 1, reuse=False), {}, None)
    assert len(closed) == 1


def test_attention_is_counted_by_visible_keys(geometry: ModelGeometry) -> None:
    """The keys of every row, one by one, from the definition of visibility."""
    rank = rank_of(geometry, 1)
    context, meter = rank.metered(HostClock())
    length = 77
    first_token(context, segment_table(length, 1, reuse=False), {}, None)
    g = geometry
    pairs = 0
    for layer in range(g.layers):
        ratio = g.ratio(layer)
        for position in range(length):
            entries = (position + 1) // ratio if ratio else 0
            chosen = min(entries, g.index_topk) if ratio == g.csa_ratio else entries
            pairs += min(position + 1, g.window) + chosen
    by_op = {line.op: line for line in meter.lines(CEILINGS)}
    assert by_op["seg_latent_attention"].operations == 4 * g.head_dim * g.heads * pairs


@pytest.mark.parametrize("counts", [[3, 3, 3], [3, 2, 2], [1, 0, 0], [4, 4, 3]])
def test_replaced_ranks_send_as_many_rows_as_real_ones(counts: list[int]) -> None:
    for rank, count in enumerate(counts):
        own = torch.arange(1.0, 2 * count + 1).view(count, 2)
        gathered = StandInCollectives(rank, len(counts)).all_gather(own, counts)
        assert gathered.shape == (sum(counts), 2)
        assert torch.equal(gathered[:count], own)
        assert gathered.bool().all() == bool(count)


def test_a_floor_is_the_longer_of_bytes_and_arithmetic() -> None:
    assert Work(bytes=10**10, bf16=10**10).floor_s(CEILINGS) == pytest.approx(1.0)
    assert Work(bytes=10**9, bf16=10**11, fp8=torch.tensor(2 * 10**11)).floor_s(CEILINGS) == pytest.approx(2.0)
    assert share_of_roofline([]) == 0.0
    # What is faster than its floor makes up for nothing else.
    lines = [
        StageLine(op=op, calls=1, seconds=1.0, floor_s=floor_s, bytes=0, operations=0)
        for op, floor_s in (("cached", 7.0), ("slow", 0.5))
    ]
    assert share_of_roofline(lines) == pytest.approx(0.75)


def test_attributes_of_the_backend_pass_through(geometry: ModelGeometry) -> None:
    ops = ReferenceOps(LocalCollectives())
    meter = MeteredOps(ops=ops, geometry=geometry, clock=HostClock())
    x = torch.randn(3, 4)
    assert torch.equal(meter.add(x, x), 2 * x)
    assert [line.op for line in meter.lines(CEILINGS)] == ["add"]
    assert not hasattr(meter, "no_such_op")
