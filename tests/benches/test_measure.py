"""What the table of measured ops calls right, wrong, met and missed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from benches import bench_ops
from benches.measure import Case, Ceilings, Line, cells, document, measure, poisoned_memory, unless_equal, worst

CEILINGS = Ceilings(copy_bytes=4e12, bf16_operations=8e14, fp8_operations=1.2e15)


def line(**changes: Any) -> Line:
    values: dict[str, Any] = {
        "op": "copy", "shape": "8", "error": 0.5, "ms": 2.0, "operations": 0.0, "moved": 4e9, "floor": "copy",
        "floor_ms": 1.0, "copy_ms": 1.5, "peers": {}, "target": 0.5,
    }  # fmt: skip
    return Line(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "met"),
        ({"ms": 2.1}, "MISSED"),
        ({"target": None}, ""),
        ({"error": 1.01, "ms": None}, "WRONG"),
        ({"error": math.nan, "ms": None}, "WRONG"),
        ({"floor": None, "floor_ms": None}, "no peer"),
        ({"floor": None, "floor_ms": None, "peers": {"other": 1.5, "third": 0.1}}, "met"),
        ({"floor": None, "floor_ms": None, "peers": {"other": 0.9}}, "MISSED"),
    ],
)
def test_verdicts(changes: dict[str, Any], verdict: str) -> None:
    found = line(**changes)
    assert found.verdict == verdict
    assert len(cells(found)) == 12


def test_a_wrong_result_is_not_timed() -> None:
    calls = []
    case = Case(op="x", shape="1", call=lambda: calls.append(1), error=lambda: math.inf, moved=4e9, floor="copy")
    found = measure(case, CEILINGS)
    assert found.verdict == "WRONG"
    assert found.ms is None
    assert found.floor_ms == pytest.approx(1.0)
    assert calls == []


def test_errors_are_in_units_of_what_is_allowed() -> None:
    assert worst((1.0, 2.0), (3.0, 4.0)) == 0.75
    assert worst((0.0, 1.0), (math.nan, 1.0)) == math.inf
    assert unless_equal(torch.ones(2), torch.ones(2)) == 0
    assert unless_equal(torch.ones(2), torch.tensor([1.0, math.nan])) == math.inf


def test_fresh_memory_is_poisoned_and_only_inside() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(64).isnan().all()
        assert torch.empty(64, dtype=torch.bfloat16).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_document_is_json_without_infinities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    text = json.dumps(document([line(), line(error=math.inf, ms=None)], CEILINGS), allow_nan=False)
    good, bad = json.loads(text)["lines"]
    assert (good["ratio"], good["copy_ratio"], good["verdict"]) == (0.5, 0.75, "met")
    assert (bad["error"], bad["ratio"], bad["copy_ratio"], bad["verdict"]) == (None, None, None, "WRONG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_ops.main(["--ops", "moe"]) == 2
    assert "no CUDA GPU was found" in capsys.readouterr().err


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_ops.main(["--ops", "everything"])
    assert "attention" in capsys.readouterr().err
