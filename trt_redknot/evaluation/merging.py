"""Results of several runs of the same comparison as those of one: the folders that one command filled side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trt_redknot.digests import digest_json
from trt_redknot.evaluation.arms import PairResult
from trt_redknot.evaluation.journal import RESULTS, JournalError, read_journal

# What makes pairs of two runs comparable; which questions were asked, and left out, may differ.
_SHARED = ("records", "digest", "variants", "engines", "answer_tokens")


def result_folders(output: Path) -> list[Path]:
    """The folder itself where an evaluation wrote results into it, else the folders in it that have some, by name."""
    if (output / RESULTS).is_file() or not output.is_dir():
        return [output]
    return sorted(path.parent for path in output.glob(f"*/{RESULTS}")) or [output]


def read_results(folders: Sequence[Path]) -> tuple[dict[str, Any], list[PairResult]]:
    """One run that asked what all of them asked, and their pairs.

    Args:
        folders: at least one, each with the results of one run.

    Raises:
        JournalError: a file is missing or damaged, compares something else than the first, or has a pair that another
            one has.
    """
    first, *others = folders
    run, pairs = read_journal(first / RESULTS)
    if not others:
        return run, pairs
    asked, known = [run.get("asked")], {(pair.variant, pair.id) for pair in pairs}
    left_out = list(run.get("left_out", []))
    for folder in others:
        further, more = read_journal(folder / RESULTS)
        differing = [key for key in _SHARED if further.get(key) != run.get(key)]
        if differing:
            raise JournalError(
                "results of different comparisons cannot be put together",
                expected={key: run.get(key) for key in differing}, found={key: further.get(key) for key in differing},
                path=folder / RESULTS, remedy=f"Report {first} and {folder} one by one.",
            )  # fmt: skip
        twice = next(((pair.variant, pair.id) for pair in more if (pair.variant, pair.id) in known), None)
        if twice is not None:
            raise JournalError(
                "a pair is in two results", found=f"{twice[1]} of {twice[0]}", path=folder / RESULTS,
                remedy="Keep one of the two folders.",
            )  # fmt: skip
        known |= {(pair.variant, pair.id) for pair in more}
        pairs += more
        asked.append(further.get("asked"))
        left_out += further.get("left_out", [])
        run["questions"] += further["questions"]
    return {**run, "asked": digest_json(asked), "left_out": left_out}, pairs


def of_all_variants(run: dict[str, Any], pairs: Sequence[PairResult]) -> list[PairResult]:
    """The pairs of records that every variant has a result of: what a run that was stopped can compare."""
    names = {variant["name"] for variant in run["variants"]}
    having: dict[str, set[str]] = {}
    for pair in pairs:
        having.setdefault(pair.id, set()).add(pair.variant)
    return [pair for pair in pairs if having[pair.id] >= names]
