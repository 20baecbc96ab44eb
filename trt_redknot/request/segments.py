"""The segment table of a request: where each segment starts and what it is. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum


class SegmentKind(StrEnum):
    """PREFIX: an unedited artifact at position 0, exact. RELOCATED: any other artifact. FRESH: tokens without one."""

    PREFIX = "prefix"
    RELOCATED = "relocated"
    FRESH = "fresh"


class RowClass(IntEnum):
    """What a row runs in the reusable layers (table of docs/policy.md)."""

    PROTECTED = 0
    ACTIVE = 1
    OMITTED = 2


class Protection(IntFlag):
    """Why a row is protected; a row may have several reasons."""

    QUERY = 1
    NEW = 2
    DIRTY = 4
    BOUNDARY = 8
    TOP_ENTRIES = 16
    TAIL = 32
    ALL = 64


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment of a request: tokens [start, start + length) of it, in a frame whose position 0 is `start`.

    Attributes:
        edits: (position in the segment, token id), sorted.
    """

    index: int
    kind: SegmentKind
    start: int
    length: int
    artifact_id: str | None = None
    edits: tuple[tuple[int, int], ...] = ()

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def is_document(self) -> bool:
        """Documents pool their last, partial window; fresh segments never do."""
        return self.kind is not SegmentKind.FRESH

    def entries(self, ratio: int) -> int:
        """Compressed entries of the segment at `ratio` tokens per window (0: no compressor)."""
        if ratio == 0:
            return 0
        return -(-self.length // ratio) if self.is_document else self.length // ratio
