"""Consecutive rows of a table of fixed size, taken and given back. The same calls give the same places everywhere."""

from __future__ import annotations


class Ranges:
    """The free rows of a table. First fit: the lowest gap that is long enough.

    Args:
        rows: of the table.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        # (start, stop) of each gap, ascending; gaps never touch.
        self._gaps: list[tuple[int, int]] = [(0, rows)] if rows else []

    @property
    def free(self) -> int:
        return sum(stop - start for start, stop in self._gaps)

    @property
    def longest(self) -> int:
        """Rows of the longest gap."""
        return max((stop - start for start, stop in self._gaps), default=0)

    def take(self, rows: int) -> int:
        """The first of `rows` consecutive rows that are free. ValueError where there are none: ask `longest` before."""
        if rows == 0:
            return 0
        for place, (start, stop) in enumerate(self._gaps):
            if stop - start >= rows:
                self._gaps[place : place + 1] = [(start + rows, stop)] if start + rows < stop else []
                return start
        raise ValueError(f"no gap of {rows} rows among {self._gaps}")

    def give(self, start: int, rows: int) -> None:
        """Free rows that were taken together."""
        if rows == 0:
            return
        stop = start + rows
        place = next((index for index, gap in enumerate(self._gaps) if gap[0] >= start), len(self._gaps))
        before = self._gaps[place - 1] if place else None
        after = self._gaps[place] if place < len(self._gaps) else None
        assert 0 <= start < stop <= self.rows, f"rows {start} .. {stop} of {self.rows}"
        assert before is None or before[1] <= start, f"rows {start} .. {stop} are free in part: {before}"
        assert after is None or stop <= after[0], f"rows {start} .. {stop} are free in part: {after}"
        low, high, first, last = start, stop, place, place
        if before is not None and before[1] == start:
            low, first = before[0], place - 1
        if after is not None and after[0] == stop:
            high, last = after[1], place + 1
        self._gaps[first:last] = [(low, high)]
