"""One outcome for all ranks: what fails on one of them fails on all, as the same typed error."""

from __future__ import annotations

import json

from trt_redknot.collectives.base import Collectives
from trt_redknot.errors import (
    BusyError,
    CapacityError,
    CheckpointError,
    CollectiveError,
    ConfigError,
    EngineError,
    RedKnotError,
    RequestError,
    StoreError,
)

_KINDS: tuple[type[RedKnotError], ...] = (
    BusyError,
    CapacityError,
    StoreError,
    CheckpointError,
    ConfigError,
    EngineError,
    RequestError,
    CollectiveError,
)


def error_to_json(error: RedKnotError) -> dict[str, str | None]:
    """An error as data. Subclasses that other ranks may not know travel as the nearest common class."""
    kind = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), RedKnotError.__name__)
    fields = {name: getattr(error, name) for name in ("problem", "expected", "found", "path", "remedy")}
    return {"kind": kind, **{name: None if value is None else str(value) for name, value in fields.items()}}


def error_from_json(data: dict[str, str | None]) -> RedKnotError:
    kind = next((kind for kind in _KINDS if kind.__name__ == data["kind"]), RedKnotError)
    return kind(
        str(data["problem"]),
        expected=data["expected"],
        found=data["found"],
        path=data["path"],
        remedy=data["remedy"],
    )


def agree(collectives: Collectives, value: object, error: RedKnotError | None) -> list[object]:
    """Every rank's JSON value, or on every rank the error of the lowest rank that has one. Collective.

    Raises:
        RedKnotError: of the class of the first failed rank's error, naming that rank where there are several.
    """
    own = {"value": value if error is None else None, "error": None if error is None else error_to_json(error)}
    replies = [json.loads(reply) for reply in collectives.exchange(json.dumps(own).encode())]
    for rank, reply in enumerate(replies):
        if reply["error"] is not None:
            failure = error_from_json(reply["error"])
            if collectives.size > 1:
                failure = type(failure)(
                    f"rank {rank}: {failure.problem}",
                    expected=failure.expected,
                    found=failure.found,
                    path=failure.path,
                    remedy=failure.remedy,
                )
            raise failure from error
    return [reply["value"] for reply in replies]
