"""Measured points that `run/bench_ttft.py` saved, for comparison with projections. Evidence class: archived."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import ConfigError

_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One arm at one length: speed-up of the time to first token, and the share of token-rows that its plan saved.

    Attributes:
        tail: of the policies of the run, but for those of arms that have a tail of their own.
    """

    length: int
    documents: int
    tail: int
    arm: str
    speedup: float
    token_rows_saved: float


# A bench file holds more than is read here.
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
    documents: int = Field(ge=1)
    arms: dict[str, _Arm]


class _Check(_Loose):
    faults: list[str]


class _Run(_Loose):
    geometry: str
    layers: int
    layers_of: int
    # Earlier files name none: of the runs that are kept it is the default one.
    tail: int = Field(default_factory=lambda: ReusePolicy().tail, ge=0)
    check: list[_Check] = []
    lengths: list[_Length]


def read_measured(path: Path, geometry: str) -> list[MeasuredPoint]:
    """The reuse arms of a bench file.

    Args:
        geometry: name of the released network that was to be measured.

    Raises:
        ConfigError: unreadable, no such file, of another network (another geometry, or not all of its layers), or of a
            run whose arms disagreed.
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
    if found.geometry != geometry or found.layers != found.layers_of:
        raise ConfigError(
            "the bench file is of another network", expected=f"all layers of {geometry}",
            found=f"{found.layers} of {found.layers_of} layers of {found.geometry}", path=path,
            remedy="Name the geometry that was measured (--geometry); runs of some layers cannot be compared.",
        )  # fmt: skip
    faults = [fault for check in found.check for fault in check.faults]
    if faults:
        raise ConfigError(
            "the times of the bench file are those of wrong answers", expected="arms that agree",
            found="; ".join(faults), path=path, remedy="Run the bench again on a machine on which its check passes.",
        )  # fmt: skip
    return [
        MeasuredPoint(
            length=at.length,
            documents=at.documents,
            tail=found.tail,
            arm=name,
            speedup=arm.speedup,
            token_rows_saved=arm.ledgers.token_rows.share,
        )
        for at in found.lengths
        for name, arm in at.arms.items()
        if name != "recompute"
    ]
