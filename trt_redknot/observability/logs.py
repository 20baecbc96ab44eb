"""Structured logs: one JSON object a line, over the standard library's logging. The only place that formats records."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from trt_redknot.errors import StoreError
from trt_redknot.observability.events import Lookup, Purpose, Tier

LOGGER = "trt_redknot"
# What every record has; everything else was given as `extra` and belongs to the event.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A record as one line: time (UTC), level, logger, message, rank, fields of the event, traceback where it has one.

    Control characters, newlines included, are escaped, so that no text can forge a line.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "rank": self._rank,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@contextlib.contextmanager
def json_log(target: Path | str, *, rank: int = 0, level: int = logging.INFO) -> Iterator[None]:
    """Write what this package logs to a file (appended) or, for "-", to stderr, as JSON lines.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        handler = logging.StreamHandler(sys.stderr) if str(target) == "-" else logging.FileHandler(target, delay=False)
    except OSError as error:
        raise StoreError(f"the log cannot be written: {error.strerror or error}", path=target) from error
    handler.setFormatter(JsonLines(rank))
    logger = logging.getLogger(LOGGER)
    before = (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        # Not the attribute: loggers below remember what they are enabled for.
        logger.setLevel(before[0])
        logger.propagate = before[1]
        handler.close()


class StoreLog:
    """Store events as log records: what an operator must see as warnings, the rest as info and debug."""

    def __init__(self, namespace: str) -> None:
        self._log = logging.getLogger(f"{LOGGER}.store")
        self._namespace = namespace

    def _tell(self, level: int, message: str, event: str, **fields: object) -> None:
        self._log.log(level, message, extra={"event": event, "namespace": self._namespace, **fields})

    def looked_up(self, artifact_id: str, outcome: Lookup, purpose: Purpose) -> None:
        text = f"artifact {artifact_id:.64}: {outcome}"
        self._tell(logging.DEBUG, text, "lookup", artifact_id=artifact_id, outcome=outcome, purpose=purpose)

    def moved(self, tier: Tier, bytes: int) -> None:
        """Bytes are counted, not told one by one."""

    def built(self, artifact_id: str, generation: int, *, bytes: int, seconds: float) -> None:
        self._tell(
            logging.INFO, f"artifact {artifact_id} generation {generation} was built", "built",
            artifact_id=artifact_id, generation=generation, bytes=bytes, seconds=round(seconds, 6),
        )  # fmt: skip

    def evicted(self, artifact_id: str, generation: int, bytes: int) -> None:
        self._tell(
            logging.INFO, f"artifact {artifact_id} generation {generation} was evicted", "evicted",
            artifact_id=artifact_id, generation=generation, bytes=bytes,
        )  # fmt: skip

    def quarantined(self, artifact_id: str, generation: int, reason: str) -> None:
        self._tell(
            logging.WARNING, f"artifact {artifact_id} generation {generation} is corrupt and was set aside: {reason}",
            "quarantined", artifact_id=artifact_id, generation=generation, reason=reason,
        )  # fmt: skip

    def admitted(self, documents: int) -> None:
        self._tell(logging.DEBUG, f"a request reuses {documents} documents", "admitted", documents=documents)

    def fell_back(self, reason: str, detail: str) -> None:
        self._tell(
            logging.WARNING, f"the request is recomputed: {reason}: {detail}", "fallback", reason=reason, detail=detail
        )
