"""Typed errors of the package. Each one is a user's mistake or a fault of the world around us, never a bug of ours.

A message is one line: what is wrong, what was expected, what was found, where, and what to do about it.
Commands print it and leave with `exit_code`; programs catch the class.
"""

from __future__ import annotations

from pathlib import Path


class RedKnotError(Exception):
    """Base of all errors that are reported to a user as one line.

    Args:
        problem: what is wrong, as a phrase.
        expected: what would have been right.
        found: what was there instead.
        path: the file or folder concerned.
        remedy: what to do about it.
    """

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        expected: object | None = None,
        found: object | None = None,
        path: Path | str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.found = found
        self.path = path
        self.remedy = remedy
        parts = [problem]
        if expected is not None:
            parts.append(f"expected {expected}")
        if found is not None:
            parts.append(f"found {found}")
        if path is not None:
            parts.append(f"in {path}")
        text = ", ".join(parts)
        super().__init__(f"{text}. {remedy}" if remedy else text)

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.problem, self.expected, self.found, self.path, self.remedy)
        return (_rebuild, (type(self), fields))


def _rebuild(kind: type[RedKnotError], fields: tuple[object, ...]) -> RedKnotError:
    problem, expected, found, path, remedy = fields
    return kind(str(problem), expected=expected, found=found, path=path, remedy=remedy)  # type: ignore[arg-type]


class ConfigError(RedKnotError):
    """A configuration value (checkpoint config, split profile, reuse policy) is unknown, missing or contradictory."""


class CheckpointError(RedKnotError):
    """A checkpoint's tensors are missing, unexpected, misshapen, truncated or unreadable."""


class EngineError(RedKnotError):
    """An engine directory cannot be built, opened or used as asked."""


class RequestError(RedKnotError):
    """A request cannot be answered: empty, a token outside the vocabulary, too long, ill-formed."""


class TooLongError(RequestError):
    """A prompt, with its answer, or a document has more tokens than the engine was built for."""


class StoreError(RedKnotError):
    """The artifact store cannot be read, written or locked."""


class BusyError(StoreError):
    """Another process holds what is needed, and did not let go in time. Later it may have."""


class CapacityError(StoreError):
    """The artifact store has no room for what was asked."""


class CollectiveError(RedKnotError):
    """Ranks disagree about something they must share, or a rank failed while the others waited."""

    exit_code = 3


class LaunchError(RedKnotError):
    """Ranks cannot be started on this machine."""
