"""The TTFT bench from end to end on the host, at sizes that a host has time for. No time is compared with anything."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.networks import NetworkOptions, network_config
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.cli.output import Output
from trt_redknot.collectives import LocalCollectives
from trt_redknot.config.geometry import ModelGeometry, RouterKind
from trt_redknot.config.parse import load_geometry
from trt_redknot.errors import EngineError
from trt_redknot.evaluation import ttft_bench
from trt_redknot.evaluation.machine import used_by_driver
from trt_redknot.evaluation.metering import Ceilings, HostClock
from trt_redknot.evaluation.ttft import document_length, segment_table
from trt_redknot.evaluation.ttft_bench import BenchOptions, CheckOptions, measure
from trt_redknot.evaluation.ttft_check import Agreement, Distance, SegmentAgreement
from trt_redknot.evaluation.ttft_report import render_page
from trt_redknot.reports.page import ReportError

CHECK = CheckOptions(layers=7, experts=8, vocab=97, documents=2, length=2 * 128 + 256, chunks=(600, 200), runs=1)


class Host:
    """A machine without a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.clock = HostClock()
        self.begun = 0

    def describe(self) -> dict[str, object]:
        return {"gpu": "none"}

    def ceilings(self) -> Ceilings:
        return Ceilings(copy=1e10, bf16=1e11, fp8=2e11)

    def begin(self) -> None:
        self.begun += 1

    def peak_gib(self) -> tuple[float, float | None]:
        return 1.5, 2.5


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ModelGeometry:
    folder = tmp_path_factory.mktemp("geometry")
    options = NetworkOptions(kinds="schchcs", groups=2, hca=128, hidden=128, expert_width=128)
    network_config(options).save_pretrained(folder)
    return load_geometry(folder)


def options(**changed: Any) -> BenchOptions:
    small = BenchOptions(tp=2, lengths=(640,), documents=2, tail=64, chunk_rows=500, repeat=1, decode=0, check=CHECK)
    return dataclasses.replace(small, **changed)


def test_packed_experts_and_host_tiles_are_checked_timed_and_shown(geometry: ModelGeometry) -> None:
    shown, machine = StringIO(), Host()
    wanted = options(experts="fp8", place="host", form=ArtifactFormat.FP8, read_ahead=2)
    found = measure(wanted, geometry, machine, None, Output(0, stdout=shown, stderr=StringIO()))
    assert [check["routers"] for check in found["check"]] == ["hash", "learned"]
    assert [check["faults"] for check in found["check"]] == [[], []]
    assert json.loads(json.dumps(found))["lengths"][0]["driver_peak_gib"] == 2.5
    arms = found["lengths"][0]["arms"]
    assert list(arms) == ["recompute", "full, budget 10%", "active, budget 10%", "fast"]
    assert all(arm["bytes_by_tier"]["host"] > 0 for name, arm in arms.items() if name != "recompute")
    assert machine.begun == 3
    assert found["tail"] == wanted.tail
    for word in ("Protected rows against recomputation", "Time to first token", "Cold path", "Peak memory"):
        assert word in shown.getvalue()
    assert "FP8 experts" in render_page([found])


def test_faults_are_shown_before_anything_is_timed(geometry: ModelGeometry, monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = Distance(rms=0.2, largest=0.4), Distance(rms=0.1, largest=0.2)
    wrong = SegmentAgreement(
        rows=5, protected=far, recomputed=near, unrelated=Distance(rms=1.4, largest=1.5)
    )  # fmt: skip
    noted = StringIO()

    def check(*_: object, **__: object) -> Agreement:
        return Agreement(routers=RouterKind.HASH, runs=1, equal=1.0, segments=(wrong,), reused=wrong)

    def timed(_: Host) -> Ceilings:
        assert "segment 0: rms distance 2.00e-01" in noted.getvalue()
        raise FloatingPointError

    monkeypatch.setattr(ttft_bench, "check_arms", check)
    monkeypatch.setattr(Host, "ceilings", timed)
    with pytest.raises(FloatingPointError):
        measure(options(), geometry, Host(), LocalCollectives(), Output(0, stdout=StringIO(), stderr=noted))


def test_memory_of_the_driver_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    properties = type("Properties", (), {"uuid": "1234"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for script, wanted in (("echo 2048; [ $1 = --id=GPU-1234 ]", 2.0), ("echo '[N/A]'", None), ("exit 3", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert used_by_driver(torch.device("cuda", 0)) == wanted
    monkeypatch.setenv("PATH", "/nowhere")
    assert used_by_driver(torch.device("cuda", 0)) is None


def test_a_failed_check_is_written_and_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = {"check": [{"faults": ["a fault"]}], "lengths": []}
    monkeypatch.setattr(ttft_bench, "find_device", lambda name, comm: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ttft_bench, "free_memory", lambda device: 0)
    monkeypatch.setattr(ttft_bench, "measure", lambda *_: result)
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    with pytest.raises(EngineError, match=r"not what recomputation gives.*a fault"):
        ttft_bench.run_bench(BenchOptions(json_file=file, page=page), None)
    assert json.loads(file.read_text()) == result
    assert not page.exists()
    with pytest.raises(ReportError, match=r"cannot be written.*run\.json"):
        ttft_bench.run_bench(BenchOptions(json_file=file / "run.json"), None)


def test_documents_of_the_check_lie_on_whole_windows() -> None:
    check = CheckOptions()
    segments = segment_table(check.length, check.documents, reuse=True)
    assert all(segment.start % 128 == 0 for segment in segments)
    assert segments[-1].start == document_length(check.length, check.documents) * check.documents


def test_layers_can_be_left_out() -> None:
    assert BenchOptions(layers=9).network(8, 0).layers == 9
    assert BenchOptions().network(8, 0).layers == 43
    assert BenchOptions(geometry="pro").network(16, 0).layers == 61


def test_as_many_layers_as_fit_are_taken() -> None:
    """More memory, more ranks and smaller experts make room for more; what does not fit is refused."""
    gib = 2**30
    pro = BenchOptions(geometry="pro", layers="fit")
    few, more = (pro.network(16, size * gib).layers for size in (60, 139))
    assert 7 <= few < more < 61
    packed = dataclasses.replace(pro, experts="fp8")
    assert more < packed.network(16, 139 * gib).layers < 61
    assert packed.network(8, 139 * gib).layers < packed.network(16, 139 * gib).layers
    assert pro.network(16, 1000 * gib).layers == 61
    whole = BenchOptions(geometry="pro").network(16, 0)
    assert pro.network(16, 139 * gib).attention_kinds == whole.attention_kinds[:more]
    with pytest.raises(EngineError, match=r"do not fit a rank of 16"):
        pro.network(16, 10 * gib)
