"""Results of several folders put together: what one run would have, and nothing that does not belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.samples import pair, run_of
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.evaluation.journal import RESULTS, Journal, JournalError
from trt_redknot.evaluation.merging import of_all_variants, read_results, result_folders
from trt_redknot.evaluation.variants import sweep

VARIANTS = sweep(ReusePolicy(), ["epilogue"], multiple=32)
NAMES = [variant.name for variant in VARIANTS]


def write(folder: Path, ids: dict[str, list[str]], **changes: Any) -> Path:
    """Results of the variants named, by record."""
    run = {**run_of(VARIANTS), "questions": len(ids), "asked": "-".join(ids)}
    journal = Journal(folder / RESULTS, run | changes)
    for name, variants in ids.items():
        for variant in variants:
            journal.append(pair(id=name, variant=variant))
    journal.close()
    return folder


def test_folders_together_are_one_run(tmp_path: Path) -> None:
    reason = {"variant": NAMES[0], "id": "short", "reason": "too short"}
    write(tmp_path / "b", {"r3": NAMES}, left_out=[reason])
    write(tmp_path / "a", {"r1": NAMES, "r2": NAMES})
    (tmp_path / "store").mkdir()
    folders = result_folders(tmp_path)
    assert [folder.name for folder in folders] == ["a", "b"]
    run, pairs = read_results(folders)
    assert [(found.id, found.variant) for found in pairs] == [(name, v) for name in ("r1", "r2", "r3") for v in NAMES]
    assert (run["questions"], run["left_out"]) == (3, [reason])
    assert run["variants"] == run_of(VARIANTS)["variants"]
    assert run["asked"] not in ("r1-r2", "r3")


def test_a_folder_with_results_is_taken_alone(tmp_path: Path) -> None:
    write(tmp_path, {"r1": NAMES})
    write(tmp_path / "within", {"r2": NAMES})
    assert result_folders(tmp_path) == [tmp_path]
    run, pairs = read_results([tmp_path])
    assert ({found.id for found in pairs}, run["asked"]) == ({"r1"}, "r1")


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_results_says_so(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(JournalError, match="there are no results"):
        read_results(result_folders(tmp_path / folder))


@pytest.mark.parametrize(
    "change", [{"digest": "other"}, {"answer_tokens": [1, 2]}, {"variants": []}, {"engines": {}}, {"records": "other"}]
)
def test_other_comparisons_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folders = [write(tmp_path / "a", {"r1": NAMES}), write(tmp_path / "b", {"r2": NAMES}, **change)]
    with pytest.raises(JournalError, match=rf"different comparisons.*'{next(iter(change))}'"):
        read_results(folders)


def test_a_pair_twice_is_refused(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a", {"r1": NAMES, "r2": NAMES}), write(tmp_path / "b", {"r3": NAMES, "r2": NAMES[1:]})]
    with pytest.raises(JournalError, match=rf"in two results.*r2 of {NAMES[1]}"):
        read_results(folders)


def test_a_stopped_run_compares_what_all_variants_have(tmp_path: Path) -> None:
    run, pairs = read_results([write(tmp_path, {"r1": NAMES, "r2": NAMES[:1], "r3": NAMES})])
    assert {found.id for found in of_all_variants(run, pairs)} == {"r1", "r3"}
    assert len(of_all_variants(run, pairs)) == 2 * len(NAMES)
