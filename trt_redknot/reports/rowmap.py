"""The row map of a request: rows wrapped into lines and merged into runs of one kind. Geometry only, no markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import Protection, RowClass, Segment, SegmentKind

# A page of more cells is slow to open and no screen resolves them; longer requests put several rows into a cell.
MOST_CELLS = 8192
# A cell of several rows is a column of this many parts, shared among the classes of its rows.
PARTS = 8
_WINDOW = 4
_LINES = 16
_LINE_STEP = 64
_SHORTEST_LINE = 128

PREFIX_CODE = len(RowClass)
CLASS_NAMES = ("protected", "active", "omitted", "prefix")

REASON_TEXT = {
    Protection.QUERY: "query",
    Protection.NEW: "new tokens",
    Protection.DIRTY: "edited token",
    Protection.BOUNDARY: "document boundary",
    Protection.TOP_ENTRIES: "high Indexer score",
    Protection.TAIL: "recent tail",
    Protection.ALL: "policy protects all",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring cells of one line that look the same.

    Attributes:
        line: index of the line.
        first_cell, cells: extent inside the line, in cells.
        start, stop: rows of the request.
        name: one of `CLASS_NAMES`, the most frequent one of the run.
        parts: how many of a cell's `PARTS` show each class, in the order of `CLASS_NAMES`; every class that occurs
            has at least one.
        reasons: why the rows are protected, in words; empty for other classes.
        segment: index of the segment.
    """

    line: int
    first_cell: int
    cells: int
    start: int
    stop: int
    name: str
    parts: tuple[int, ...]
    reasons: tuple[str, ...]
    segment: int


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The part of a segment that lies in one line; `begins` where the segment starts in it."""

    line: int
    first_cell: int
    cells: int
    segment: int
    begins: bool


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """A drawn request.

    Attributes:
        rows_per_cell: rows that one cell stands for.
        cells_per_line: cells of a full line.
    """

    rows: int
    rows_per_cell: int
    cells_per_line: int
    lines: int
    runs: tuple[Run, ...]
    strips: tuple[Strip, ...]

    @property
    def rows_per_line(self) -> int:
        return self.rows_per_cell * self.cells_per_line


def row_map(plan: RowPlan) -> RowMap:
    """Lay out the rows of `plan`. No cell and no run crosses the border of a segment or of a line."""
    rows_per_cell = -(-plan.rows // MOST_CELLS)
    if rows_per_cell > 1:
        rows_per_cell = -(-rows_per_cell // _WINDOW) * _WINDOW
    cells = -(-plan.rows // rows_per_cell) if plan.rows else 0
    cells_per_line = max(_SHORTEST_LINE, -(-cells // _LINES // _LINE_STEP) * _LINE_STEP)
    rows_per_line = rows_per_cell * cells_per_line
    runs: list[Run] = []
    strips: list[Strip] = []
    codes = class_codes(plan)
    for segment in plan.segments:
        for start in _line_starts(segment, rows_per_line):
            stop = min(segment.stop, (start // rows_per_line + 1) * rows_per_line)
            line, first = divmod(start, rows_per_line)
            last_cell = -(-(stop - line * rows_per_line) // rows_per_cell)
            first_cell = first // rows_per_cell
            strips.append(
                Strip(
                    line=line,
                    first_cell=first_cell,
                    cells=last_cell - first_cell,
                    segment=segment.index,
                    begins=start == segment.start,
                )
            )
            runs.extend(_runs(plan, codes, segment, start, stop, rows_per_cell, rows_per_line))
    return RowMap(
        rows=plan.rows,
        rows_per_cell=rows_per_cell,
        cells_per_line=cells_per_line,
        lines=-(-plan.rows // rows_per_line) if plan.rows else 0,
        runs=tuple(runs),
        strips=tuple(strips),
    )


def class_codes(plan: RowPlan) -> NDArray[np.uint8]:
    """Index into `CLASS_NAMES` of every row, uint8 [N]: the row classes, and omitted rows of an exact prefix apart."""
    codes = plan.classes.copy()
    for segment in plan.segments:
        if segment.kind is SegmentKind.PREFIX:
            rows = codes[segment.start : segment.stop]
            rows[rows == RowClass.OMITTED] = PREFIX_CODE
    return codes


def reason_words(flags: int) -> tuple[str, ...]:
    """The reasons of a protection mask in words."""
    return tuple(text for flag, text in REASON_TEXT.items() if flags & flag)


def reason_counts(plan: RowPlan) -> dict[str, int]:
    """Rows protected for each reason; a row with several counts for each of them."""
    counts = {text: int((plan.protections & flag != 0).sum()) for flag, text in REASON_TEXT.items()}
    return {text: count for text, count in counts.items() if count}


def _line_starts(segment: Segment, rows_per_line: int) -> list[int]:
    if segment.length == 0:
        return []
    following = range((segment.start // rows_per_line + 1) * rows_per_line, segment.stop, rows_per_line)
    return [segment.start, *following]


def _runs(
    plan: RowPlan,
    codes: NDArray[np.uint8],
    segment: Segment,
    start: int,
    stop: int,
    rows_per_cell: int,
    rows_per_line: int,
) -> list[Run]:
    line, offset = divmod(start, rows_per_line)
    borders = [start, *range((start // rows_per_cell + 1) * rows_per_cell, stop, rows_per_cell)]
    looks = [
        _look(codes, plan.protections, first, last) for first, last in zip(borders, [*borders[1:], stop], strict=True)
    ]
    runs: list[Run] = []
    first = 0
    for cell in range(1, len(looks) + 1):
        if cell < len(looks) and looks[cell] == looks[first]:
            continue
        parts, flags = looks[first]
        runs.append(
            Run(
                line=line,
                first_cell=offset // rows_per_cell + first,
                cells=cell - first,
                start=borders[first],
                stop=borders[cell] if cell < len(borders) else stop,
                name=CLASS_NAMES[int(np.argmax(parts))],
                parts=parts,
                reasons=reason_words(flags),
                segment=segment.index,
            )
        )
        first = cell
    return runs


def _look(
    codes: NDArray[np.uint8], protections: NDArray[np.uint8], start: int, stop: int
) -> tuple[tuple[int, ...], int]:
    counts = np.bincount(codes[start:stop], minlength=len(CLASS_NAMES))
    parts = np.where(counts > 0, np.maximum(1, counts * PARTS // (stop - start)), 0)
    # What rounding gave or took is settled with the most frequent class, which has the most to give.
    parts[counts.argmax()] += PARTS - parts.sum()
    return tuple(int(part) for part in parts), int(np.bitwise_or.reduce(protections[start:stop]))


def segment_names(segments: Sequence[Segment], names: Sequence[str] | None) -> list[str]:
    """What to call each segment: `names` where given, else the artifact's id cut short, or its kind."""
    if names is not None:
        if len(names) != len(segments):
            raise ValueError(f"{len(names)} names for {len(segments)} segments")
        return list(names)
    return [segment.artifact_id[:12] if segment.artifact_id else segment.kind.value for segment in segments]
