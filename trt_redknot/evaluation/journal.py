"""Results of a run as they come: JSON lines that survive a kill, and belong to exactly one run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_redknot.artifacts.locks import try_lock
from trt_redknot.config.documents import parse_json_object, validated_json
from trt_redknot.errors import ConfigError, RedKnotError
from trt_redknot.evaluation.arms import PairResult

RESULTS = "results.jsonl"
_LIMIT = 1 << 30
# What the first line says at least, and as what.
_RUN = {"records": str, "digest": str, "questions": int, "variants": list, "engines": dict, "answer_tokens": list}


class JournalError(RedKnotError):
    """A results file is unreadable, damaged, or of another run."""


class Journal:
    """An open results file: first line the run, then one pair a line.

    Args:
        path: made where it is not there.
        run: what the results depend on; a file of another run is refused.

    Raises:
        JournalError: of another run, held by another one, or a line but the last is damaged; the file is as it was.
            A last line that a kill cut short is dropped.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self.results: dict[tuple[str, str], PairResult] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise JournalError(f"the results cannot be written: {error.strerror or error}", path=path) from error
        try:
            self._lock()
            self._read(run)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, result: PairResult) -> None:
        """Keep one result; it is on disk when this returns."""
        self._append(result.model_dump(mode="json"))
        self.results[result.variant, result.id] = result

    def close(self) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        """Hold the file until it is closed: lines of two runs at once would be one run's with pairs twice."""
        try:
            held = try_lock(self._file, exclusive=True)
        except OSError as error:
            raise JournalError(
                f"the results cannot be locked: {error.strerror or error}", path=self.path,
                remedy="Name an output folder on a file system that supports flock.",
            ) from error  # fmt: skip
        if not held:
            raise JournalError(
                "another evaluation is writing these results", path=self.path,
                remedy="Wait for it to end, or name another output folder.",
            )  # fmt: skip

    def _read(self, run: Mapping[str, Any]) -> None:
        try:
            lines, rest = _whole_lines(self.path)
        except OSError as error:
            raise JournalError(f"the results cannot be read: {error.strerror or error}", path=self.path) from error
        if lines:
            saved, results = _parse(lines, self.path)
            differing = sorted(key for key in {*saved, *run} if saved.get(key) != run.get(key))
            if differing:
                raise JournalError(
                    "the results are of another run", expected={key: run.get(key) for key in differing},
                    found={key: saved.get(key) for key in differing}, path=self.path,
                    remedy="Name another output folder.",
                )  # fmt: skip
            self.results = {(result.variant, result.id): result for result in results}
        elif not _line(run).startswith(rest):
            raise JournalError(
                "the file does not hold results of this run", path=self.path, remedy="Name another output folder."
            )
        # Only now is the rest known to be what a kill left of our own line.
        try:
            os.ftruncate(self._file, os.fstat(self._file).st_size - len(rest))
        except OSError as error:
            raise JournalError(f"the results cannot be mended: {error.strerror or error}", path=self.path) from error
        if not lines:
            self._append(run)

    def _append(self, value: Mapping[str, Any]) -> None:
        line = _line(value)
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError as error:
            raise JournalError(f"a result cannot be written: {error.strerror or error}", path=self.path) from error


def read_journal(path: Path) -> tuple[dict[str, Any], list[PairResult]]:
    """The run and the results of a file.

    Raises:
        JournalError: missing, empty or damaged, its first line describes no run, or a pair is there twice.
    """
    if not path.is_file():
        raise JournalError("there are no results", expected=RESULTS, path=path, remedy="Run the evaluation first.")
    lines, _ = _whole_lines(path)
    if not lines:
        raise JournalError("the results file is empty", path=path, remedy="Run the evaluation first.")
    run, pairs = _parse(lines, path)
    if not all(isinstance(run.get(key), kind) for key, kind in _RUN.items()) or not all(
        isinstance(variant, dict) and all(isinstance(variant.get(key), str) for key in ("name", "axis", "value"))
        for variant in run["variants"]
    ):
        raise JournalError(
            "the first line does not describe a run", expected=", ".join(_RUN), found=", ".join(run) or "no key",
            path=path, remedy="Name a folder that an evaluation wrote.",
        )  # fmt: skip
    known: set[tuple[str, str]] = set()
    for number, pair in enumerate(pairs, 2):
        if (pair.variant, pair.id) in known:
            raise JournalError(
                f"the pair of line {number} is there twice", found=f"{pair.id} of {pair.variant}", path=path,
                remedy="Remove one of the two lines.",
            )  # fmt: skip
        known.add((pair.variant, pair.id))
    return run, pairs


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), allow_nan=False).encode() + b"\n"


def _whole_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Lines that end in a line break, and what comes after the last one."""
    size = path.stat().st_size
    if size > _LIMIT:
        raise JournalError("the results file is too large", expected=f"at most {_LIMIT} bytes", found=size, path=path)
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    return content[:whole].splitlines(), content[whole:]


def _parse(lines: list[bytes], path: Path) -> tuple[dict[str, Any], list[PairResult]]:
    results = []
    run: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json_object(line)
            if number == 1:
                run = value
            else:
                results.append(validated_json(PairResult, value, path))
        except (ValueError, ConfigError) as error:
            raise JournalError(
                f"line {number} is damaged", found=error, path=path, remedy="Remove the file and run again."
            ) from error
    return run, results
