"""Work in steps: a generator that stops after each step, so that whoever runs it may do something else in between."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")

# Stops between steps, gives its result at the end. On several ranks every rank must take the same steps in the same
# order: a step may hold collectives.
Steps = Generator[None, None, Result]


def drain(steps: Steps[Result]) -> Result:
    """Run all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
