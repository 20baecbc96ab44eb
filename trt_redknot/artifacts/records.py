"""What the store's maintenance reports: plain records for tables and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trt_redknot.artifacts.capacity import Orphans
from trt_redknot.artifacts.certificate import Certificate
from trt_redknot.artifacts.folder import Published


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One generation as `ls` and `inspect` show it. `certificate` is None where it is malformed: `fault` says how."""

    published: Published
    leased: bool
    certificate: Certificate | None
    fault: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of `verify` for one generation: no faults, or all of them; where it was moved if it was."""

    artifact_id: str
    generation: int
    bytes: int
    faults: tuple[str, ...]
    quarantined: Path | None

    @property
    def sound(self) -> bool:
        return not self.faults


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What `gc` removed."""

    orphans: Orphans
    superseded: int
    superseded_bytes: int
    quarantined: int
    quarantined_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoreStatus:
    """Totals of a namespace and its disk, in artifacts and bytes."""

    root: Path
    namespace: str
    artifacts: int
    generations: int
    bytes: int
    pinned_bytes: int
    reserved_bytes: int
    capacity_bytes: int | None
    quarantined: int
    disk_free_bytes: int | None
