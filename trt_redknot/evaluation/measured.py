"""Measured points that `run/bench_ttft.py` saved, for comparison with projections. Evidence class: archived."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_redknot.errors import ConfigError

_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One arm at one length: speed-up of the time to first token, and the share of token-rows that its plan saved."""

    length: int
    arm: str
    speedup: float
    token_rows_saved: float


# A bench file holds more than is read here, and newer ones hold more than older ones.
class _Loose(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Ledger(_Loose):
    share: float


class _Ledgers(_Loose):
    token_rows: _Ledger


class _Arm(_Loose):
    speedup: float
    ledgers: _Ledgers


class _Length(_Loose):
    length: int = Field(ge=1)
    arms: dict[str, _Arm]


class _Run(_Loose):
    geometry: str
    lengths: list[_Length]


def read_measured(path: Path) -> list[MeasuredPoint]:
    """The reuse arms of a bench file.

    Raises:
        ConfigError: unreadable, or no such file.
    """
    try:
        if path.stat().st_size > _LIMIT:
            raise ConfigError("the bench file is too large", expected=f"at most {_LIMIT} bytes", path=path)
        found = _Run.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError("the bench file cannot be read", found=error.strerror or error, path=path) from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(
            "the file holds no measured points", expected="what run/bench_ttft.py --json writes",
            found=f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}", path=path,
        ) from error  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise ConfigError("the bench file is not JSON", found=error, path=path) from error
    return [
        MeasuredPoint(length=at.length, arm=name, speedup=arm.speedup, token_rows_saved=arm.ledgers.token_rows.share)
        for at in found.lengths
        for name, arm in at.arms.items()
        if name != "recompute"
    ]
