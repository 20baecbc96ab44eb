"""Output: silent beyond rank 0, plain without a terminal, results apart from notes."""

from __future__ import annotations

import io
import json
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from trt_redknot.cli.output import Output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_results_and_notes_go_to_their_own_streams() -> None:
    results, notes = io.StringIO(), io.StringIO()
    out = Output(stdout=results, stderr=notes)
    table = Table("column")
    table.add_row("[not markup of ours]")
    out.show(table)
    out.note("a [bold]note[/]")
    out.json({"b": 1, "a": [2]})
    assert notes.getvalue() == "a [bold]note[/]\n"
    assert "column" in results.getvalue()
    assert json.loads(results.getvalue()[results.getvalue().index("{") :]) == {"b": 1, "a": [2]}


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_other_ranks_print_nothing(stream: type[io.StringIO]) -> None:
    results, notes = stream(), stream()
    out = Output(1, stdout=results, stderr=notes)
    out.show("text")
    out.json({})
    out.note("note")
    with out.progress("work", 3) as advance:
        advance(3)
    assert (results.getvalue(), notes.getvalue()) == ("", "")


@given(total=st.integers(1, 500), steps=st.lists(st.integers(1, 50), max_size=30))
def test_plain_progress_tells_each_quarter_once(total: int, steps: list[int]) -> None:
    notes = io.StringIO()
    with Output(stdout=io.StringIO(), stderr=notes).progress("work", total) as advance:
        for step in steps:
            advance(step)
    lines = notes.getvalue().splitlines()
    done = min(total, sum(steps))
    assert len(lines) <= 4
    told = [int(line.removeprefix("work: ").split("/")[0]) for line in lines]
    assert told == sorted(set(told))
    if done == total:
        assert told[-1] == total
    elif told:
        assert told[-1] * 4 // total == done * 4 // total


def test_progress_of_nothing_is_silent() -> None:
    notes = io.StringIO()
    with Output(stdout=io.StringIO(), stderr=notes).progress("work", 0) as advance:
        advance(1)
    assert notes.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    notes = Terminal()
    with Output(stdout=io.StringIO(), stderr=notes).progress("[work]", 2) as advance:
        advance(1)
        advance(1)
    assert "2/2" in notes.getvalue()
    assert "[work]" in notes.getvalue()


def test_a_terminal_without_a_size_is_a_launcher_and_gets_plain_text() -> None:
    controller, follower = pty.openpty()
    with os.fdopen(controller, "rb", buffering=0) as reader, os.fdopen(follower, "w", encoding="utf-8") as terminal:
        assert terminal.isatty()
        out = Output(stdout=terminal, stderr=terminal)
        table = Table("a column " * 12)
        table.add_row("value")
        out.show(table)
        with out.progress("work", 2) as advance:
            advance(2)
        terminal.flush()
        text = ""
        # A terminal hands out what it has, not what was written.
        while "2/2" not in text:
            text += reader.read(1 << 16).decode()
    assert "\x1b" not in text
    assert "a column a column" in text
    assert "work: 2/2" in text
