"""Planning models, and their comparison with measured points."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.errors import ConfigError
from trt_redknot.evaluation.measured import read_measured
from trt_redknot.evaluation.planning import ceiling, project

SAVED = Path(__file__).resolve().parents[2] / "docs" / "data" / "ttft-flash-tp8-rank-h200.json"
FLASH = released_geometry("flash")
PROFILE = SplitProfile.default(FLASH)


def bench_file(arms: dict[str, object], length: int = 4096) -> dict[str, object]:
    """What run/bench_ttft.py writes of one length, as far as it is read here."""
    lengths = [{"length": length, "documents": 3, "arms": arms}]
    return {"geometry": "flash", "layers": 43, "layers_of": 43, "lengths": lengths}


@pytest.mark.parametrize(("name", "percent"), [("flash", 75.29), ("pro", 78.89)])
def test_structural_ceilings(name: str, percent: float) -> None:
    geometry = released_geometry(name)  # type: ignore[arg-type]
    assert round(100 * ceiling(geometry, SplitProfile.default(geometry)), 2) == percent


@given(
    length=st.integers(4096, 40_000), documents=st.integers(1, 8), budget=st.floats(0, 1),
    epilogue=st.sampled_from(["full", "active"]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_projections_stay_below_the_ceiling_and_pay_by_their_own_arithmetic(
    length: int, documents: int, budget: float, epilogue: str
) -> None:
    policy = ReusePolicy.model_validate({"budget": budget, "epilogue": epilogue})
    found = project(FLASH, PROFILE, length, documents, policy)
    assert 0.0 <= found.head_rows <= ceiling(FLASH, PROFILE)
    assert 0.0 <= found.token_rows < 1.0
    assert found.arithmetic_speedup == pytest.approx(1 / (1 - found.arithmetic))
    assert 0.0 < found.construction <= 1.0
    if found.break_even is not None:
        saved = found.break_even * found.arithmetic
        assert saved == pytest.approx(found.construction)


def test_pure_omission_saves_most() -> None:
    saved = [
        project(FLASH, PROFILE, 32768, 8, ReusePolicy(budget=budget)).token_rows for budget in (0.0, 0.2, 0.5, 1.0)
    ]
    assert saved == sorted(saved, reverse=True)


def test_row_counts_are_those_of_the_saved_bench() -> None:
    points = read_measured(SAVED, "flash")
    assert {point.arm for point in points} == {"full, budget 10%", "active, budget 10%", "fast"}
    shortest = [point for point in points if point.length == min(point.length for point in points)]
    for point in shortest:
        if point.arm != "fast":
            policy = ReusePolicy.model_validate({"budget": 0.10, "epilogue": point.arm.split(",")[0]})
            projected = project(FLASH, PROFILE, point.length, point.documents, policy)
            assert projected.token_rows == pytest.approx(point.token_rows_saved, abs=1e-12)
            # Arithmetic is what cannot be bought back by anything else: the clock never gains more.
            assert 1.0 < point.speedup < projected.arithmetic_speedup


def test_what_a_bench_file_has_beside_is_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    full = {"speedup": 2.5, "ledgers": {"token_rows": {"saved": 3, "total": 5, "share": 0.6}}, "more": 1}
    none = {"speedup": 1.0, "ledgers": {"token_rows": {"saved": 0, "total": 5, "share": 0.0}}}
    arms = {"recompute": none, "full": full}
    path.write_text(json.dumps(bench_file(arms) | {"other": []}))
    (point,) = read_measured(path, "flash")
    assert (point.length, point.documents) == (4096, 3)
    assert (point.arm, point.speedup, point.token_rows_saved) == ("full", 2.5, 0.6)


@pytest.mark.parametrize("content", ["", "{", "{}", '[{"length": 1}]', '[{"length": "x", "arm": 1}]', "3"])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bench file|measured points"):
        read_measured(path, "flash")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(tmp_path / "none.json", "flash")


@pytest.mark.parametrize("other", [{"geometry": "pro"}, {"layers": 9}])
def test_files_of_another_network_are_refused(tmp_path: Path, other: dict[str, object]) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_file({}) | other))
    with pytest.raises(ConfigError, match="another network"):
        read_measured(path, "flash")


def test_files_of_a_run_whose_arms_disagreed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_file({}) | {"check": [{"faults": []}, {"faults": ["segment 1: rms"]}]}))
    with pytest.raises(ConfigError, match=r"wrong answers.*segment 1: rms"):
        read_measured(path, "flash")
    path.write_text(json.dumps(bench_file({}) | {"check": [{"faults": []}]}))
    assert read_measured(path, "flash") == []


def test_the_command_projects_with_the_tail_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "bench.json"
    figures = {"speedup": 1.5, "ledgers": {"token_rows": {"share": 0.3}}}
    names = ("recompute", "full, budget 10%", "fast")
    for tail in (None, 128):
        more = {} if tail is None else {"tail": tail}
        measured.write_text(json.dumps(bench_file(dict.fromkeys(names, figures), 65536) | more))
        arguments = ["projections", "--length", "8192", "--measured", str(measured), "--json"]
        evaluate_command(None).main(arguments, standalone_mode=False)
        checks = {check["arm"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        policies = {
            "full, budget 10%": ReusePolicy(tail=32768 if tail is None else tail),
            "fast": ReusePolicy(budget=0.05, tail=4096, epilogue="active"),
        }
        for name, policy in policies.items():
            projected = project(FLASH, PROFILE, 65536, 3, policy).token_rows
            assert checks[name]["projected_token_rows_saved"] == projected


def test_more_than_the_network_has_positions_for_is_refused() -> None:
    for option in ("--length", "--documents"):
        with pytest.raises(click.BadParameter, match="is not in the range"):
            evaluate_command(None).main(["projections", option, str(10**20)], standalone_mode=False)


def test_the_command_says_that_it_projects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "bench.json"
    figures = {"speedup": 1.5, "ledgers": {"token_rows": {"share": 0.3}}}
    names = ("recompute", "full, budget 10%", "active, budget 10%", "other")
    measured.write_text(json.dumps(bench_file(dict.fromkeys(names, figures))))
    arguments = ["projections", "--length", "8192", "--documents", "4", "--measured", str(measured)]
    evaluate_command(None).main([*arguments, "--json"], standalone_mode=False)
    said = json.loads(capsys.readouterr().out)
    assert said["evidence"] == "projected"
    assert round(said["ceiling"], 4) == 0.7529
    assert said["lengths"] == [project(FLASH, PROFILE, 8192, 4, ReusePolicy()).to_json()]
    assert [check["arm"] for check in said["checks"]] == ["full, budget 10%", "active, budget 10%"]
    evaluate_command(None).main(arguments, standalone_mode=False)
    shown = capsys.readouterr().out
    assert shown.count("(projected)") >= 3
    assert "(archived)" in shown
