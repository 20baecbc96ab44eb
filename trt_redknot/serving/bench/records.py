"""What happened to one request of a bench, as a line of its raw log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from trt_redknot.errors import StoreError


class Arm(StrEnum):
    REUSE = "reuse"
    RECOMPUTE = "recompute"


class Loop(StrEnum):
    """CLOSED: so many clients, each asks again when it is answered. OPEN: requests come when they come (Poisson)."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class Level:
    """How hard the service is asked: `value` clients, or requests a second."""

    loop: Loop
    value: float

    @property
    def name(self) -> str:
        return f"{self.value:g} clients" if self.loop is Loop.CLOSED else f"{self.value:g}/s"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request. Times are seconds on one clock.

    Attributes:
        prompt: number of its prompt; both arms of a level answer the same prompts.
        warm_up: it is in the log, and in no figure.
        due_s: when it was to be sent; what is measured is measured from here, so that a client that is late counts.
        first_s, last_s: when the first and the last token came; None where none did.
        tokens: how many came.
        fault: why it failed; None: it was completed.
        arm_run: what the service says it did, with the reason of a fallback.
    """

    arm: Arm
    level: Level
    round: int
    prompt: int
    warm_up: bool
    due_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    end_s: float
    tokens: int
    fault: str | None
    detail: str | None = None
    arm_run: str | None = None
    fallback_reason: str | None = None

    @property
    def completed(self) -> bool:
        return self.fault is None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def latency_s(self) -> float:
        return self.end_s - self.due_s


def write_log(path: Path, header: dict[str, object], records: Iterable[Record]) -> None:
    """A first line that says what was run, then one line a request.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"bench": header}) + "\n")
            for record in records:
                file.write(json.dumps(asdict(record)) + "\n")
    except OSError as error:
        raise StoreError(f"the raw log cannot be written: {error.strerror or error}", path=path) from error
