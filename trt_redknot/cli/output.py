"""What commands print: tables, lines and progress, silent on all ranks but the first, plain where no person watches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# A file or a pipe has no width; tables get enough to keep their columns whole.
_PLAIN_WIDTH = 140
_PLAIN_STEPS = 4

Advance = Callable[[int], None]


class Output:
    """Prints for one rank.

    Results (tables, JSON) go to `stdout`; progress and notes go to `stderr`, so that results can be piped.

    Args:
        rank: ranks other than 0 print nothing.
        stdout, stderr: left out: the process's own at the time of the call.
    """

    def __init__(self, rank: int = 0, *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._silent = rank != 0
        self._results = _console(stdout or sys.stdout)
        self._notes = _console(stderr or sys.stderr)

    def show(self, *renderables: RenderableType) -> None:
        """Print rich tables, panels or text as a result."""
        if not self._silent:
            for renderable in renderables:
                self._results.print(renderable)

    def json(self, value: object) -> None:
        """Print a JSON value as a result, indented, keys in their order."""
        if not self._silent:
            print(json.dumps(value, indent=2, allow_nan=False), file=self._results.file)

    def note(self, text: str) -> None:
        """One plain line for the person who waits; never part of the result."""
        if not self._silent:
            self._notes.print(text, markup=False, highlight=False)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Advance]:
        """A bar of `total` steps; yields the function that advances it. Plain lines at every quarter without a TTY."""
        if self._silent or total <= 0:
            yield lambda _: None
            return
        if not self._notes.is_terminal:
            yield _PlainProgress(self.note, description, total)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._notes) as progress:
            task = progress.add_task(description, total=total)
            yield lambda steps: progress.advance(task, steps)


class _PlainProgress:
    def __init__(self, note: Callable[[str], None], description: str, total: int) -> None:
        self._note = note
        self._description = description
        self._total = total
        self._done = 0

    def __call__(self, steps: int) -> None:
        before = self._done * _PLAIN_STEPS // self._total
        self._done = min(self._total, self._done + steps)
        if self._done * _PLAIN_STEPS // self._total > before:
            self._note(f"{self._description}: {self._done}/{self._total}")


def _console(file: TextIO) -> Console:
    return Console(file=file) if _is_watched(file) else Console(file=file, width=_PLAIN_WIDTH, force_terminal=False)


def _is_watched(file: TextIO) -> bool:
    """Whether a person's terminal is behind `file`. mpirun gives its ranks a pseudo terminal without a size."""
    if not file.isatty():
        return False
    try:
        return os.get_terminal_size(file.fileno()).columns > 0
    except (OSError, ValueError):
        return True
