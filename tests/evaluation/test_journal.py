"""The results file: kept line by line, mended after a kill, refused when it is of another run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.samples import pair, run_of
from trt_redknot.evaluation.journal import Journal, JournalError, read_journal


def fill(path: Path, count: int) -> Path:
    journal = Journal(path, run_of())
    for index in range(count):
        journal.append(pair(id=f"r{index}"))
    journal.close()
    return path


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    path = fill(tmp_path / "out" / "results.jsonl", 3)
    run, pairs = read_journal(path)
    assert run == run_of()
    assert pairs == [pair(id=f"r{index}") for index in range(3)]
    journal = Journal(path, run_of())
    assert list(journal.results) == [("policy", f"r{index}") for index in range(3)]
    journal.close()


def test_a_line_that_a_kill_cut_short_is_dropped_and_written_again(tmp_path: Path) -> None:
    path = fill(tmp_path / "results.jsonl", 3)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -random.randint(1, last - 1)])
    journal = Journal(path, run_of())
    assert list(journal.results) == [("policy", "r0"), ("policy", "r1")]
    journal.append(pair(id="r2"))
    journal.close()
    assert path.read_bytes() == whole


def test_a_kill_before_the_first_line_leaves_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"records": "mi')
    Journal(path, run_of()).close()
    assert read_journal(path) == (run_of(), [])


@pytest.mark.parametrize(
    "content", [b"notes without a line break", b'{"a": 1}\nthe last of many notes', b"\xff\xfe\n\xff"]
)
def test_a_file_of_someone_else_is_refused_and_untouched(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError):
        Journal(path, run_of())
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.clear(),
        lambda run: run.pop(random.choice(list(run))),
        lambda run: run.update(variants="policy"),
        lambda run: run.update(variants=["policy"]),
        lambda run: run["variants"][0].pop(random.choice(["name", "axis", "value"])),
    ],
)
def test_a_first_line_that_is_no_run_is_refused(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    path = fill(tmp_path / "results.jsonl", 2)
    run, *pairs = path.read_text(encoding="utf-8").splitlines()
    values = json.loads(run)
    change(values)
    path.write_text("\n".join([json.dumps(values), *pairs, ""]), encoding="utf-8")
    with pytest.raises(JournalError, match="the first line does not describe a run"):
        read_journal(path)


def test_a_pair_that_would_be_counted_twice_is_refused(tmp_path: Path) -> None:
    path = fill(tmp_path / "results.jsonl", 3)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines, lines[2], ""]), encoding="utf-8")
    with pytest.raises(JournalError, match="the pair of line 5 is there twice, found r1 of policy"):
        read_journal(path)


def test_results_of_another_run_are_refused_and_untouched(tmp_path: Path) -> None:
    path = fill(tmp_path / "results.jsonl", 1)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"of another run.*'digest': 'e.*'digest': 'd"):
        Journal(path, run_of() | {"digest": "e" * 64})
    assert path.read_bytes() == before


def test_a_file_that_another_run_writes_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    journal = Journal(path, run_of())
    with pytest.raises(JournalError, match=r"another evaluation is writing.*results\.jsonl"):
        Journal(path, run_of())
    journal.append(pair(id="r0"))
    journal.close()
    Journal(path, run_of()).close()
    assert read_journal(path) == (run_of(), [pair(id="r0")])


def test_refused_files_leave_nothing_open(tmp_path: Path) -> None:
    damaged, other, large = (fill(tmp_path / name / "results.jsonl", 1) for name in ("damaged", "other", "large"))
    damaged.write_bytes(damaged.read_bytes() + b"{}\n")
    os.truncate(large, (1 << 30) + 1)
    for path, run, words in (
        (damaged, run_of(), "line 3 is damaged"),
        (other, run_of() | {"digest": "e" * 64}, "of another run"),
        (large, run_of(), "too large"),
    ):
        with pytest.raises(JournalError, match=words):
            Journal(path, run)
        there = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert str(path) not in there


@pytest.mark.parametrize("damage", [b"\0\0\n", b"{}\n", b'{"variant": "policy"}\n', b"[]\n"])
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    path = fill(tmp_path / "results.jsonl", 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    with pytest.raises(JournalError, match="line 3 is damaged"):
        read_journal(path)


def test_no_results_are_a_fault_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there are no results"):
        read_journal(tmp_path / "results.jsonl")
    (tmp_path / "results.jsonl").touch()
    with pytest.raises(JournalError, match="empty"):
        read_journal(tmp_path / "results.jsonl")
    with pytest.raises(JournalError, match="cannot be written"):
        Journal(tmp_path / "results.jsonl" / "below", run_of())
