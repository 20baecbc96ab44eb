"""Which rows run: the protected set, the candidates, the active budget (docs/policy.md).

Counts are known before anything runs; only *which* candidate windows are taken waits for the Indexer scores of the
leading fence. A device can therefore keep its shapes fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.config.policy import ReusePolicy
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import Protection, RowClass, Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Windows of relocated artifact rows that nothing protects yet, in request order.

    Attributes:
        starts, stops: int64 [C]: request rows of each window.
        entries: int64 [C]: the window's compressed entry, counted from the first entry of the sequence.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    entries: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return int((self.stops - self.starts).sum())


def _mark_whole_windows(protections: NDArray[np.uint8], segment: Segment, window: int) -> None:
    """Spread every flag of a document's row over the row's whole window."""
    rows = protections[segment.start : segment.stop]
    windows = -(-segment.length // window)
    padded = np.zeros(windows * window, dtype=np.uint8)
    padded[: segment.length] = rows
    flags = np.bitwise_or.reduce(padded.reshape(windows, window), axis=1)
    rows[:] = np.repeat(flags, window)[: segment.length]


def protect(
    segments: Sequence[Segment], policy: ReusePolicy | None, window: int, *, boundary: int
) -> NDArray[np.uint8]:
    """Flags of :class:`Protection` that are known before the leading fence runs: uint8 [N].

    `boundary` rows are protected at each end of a document where the policy leaves their number out.
    `policy` None protects every row (the recompute arm). Rows of an exact prefix need no protection: Q is the last
    fresh segment, or the last window of a request that ends with a document.
    """
    total = segments[-1].stop
    flags = np.zeros(total, dtype=np.uint8)
    if policy is None or policy.protect == "all":
        flags[:] = int(Protection.ALL)
    if policy is None:
        return flags
    tail = min(policy.tail, int(total * policy.tail_share))
    ends = boundary if policy.boundary is None else policy.boundary
    for segment in segments:
        rows = flags[segment.start : segment.stop]
        last = segment is segments[-1]
        if segment.kind is SegmentKind.FRESH:
            rows |= int(Protection.QUERY if last else Protection.NEW)
            continue
        if last:
            rows[-1] |= int(Protection.QUERY)
        if segment.kind is SegmentKind.RELOCATED:
            for position, _ in segment.edits:
                rows[position] |= int(Protection.DIRTY)
            rows[:ends] |= int(Protection.BOUNDARY)
            rows[max(0, segment.length - ends) :] |= int(Protection.BOUNDARY)
            rows[max(0, total - tail - segment.start) :] |= int(Protection.TAIL)
        _mark_whole_windows(flags, segment, window)
    return flags


def candidates(segments: Sequence[Segment], flags: NDArray[np.uint8], window: int) -> Candidates:
    """Windows of relocated rows without a flag."""
    starts, stops, entries = [], [], []
    first_entry = 0
    for segment in segments:
        if segment.kind is SegmentKind.RELOCATED:
            windows = np.arange(-(-segment.length // window))
            low = segment.start + windows * window
            free = flags[low] == 0
            starts.append(low[free])
            stops.append(np.minimum(low[free] + window, segment.stop))
            entries.append(first_entry + windows[free])
        first_entry += segment.entries(window)
    if not starts:
        empty = np.empty(0, dtype=np.int64)
        return Candidates(starts=empty, stops=empty, entries=empty)
    return Candidates(starts=np.concatenate(starts), stops=np.concatenate(stops), entries=np.concatenate(entries))


def has_candidates(segments: Sequence[Segment], flags: NDArray[np.uint8]) -> bool:
    """Whether some relocated row has no flag: without one there is nothing to choose."""
    return any(
        segment.kind is SegmentKind.RELOCATED and not flags[segment.start : segment.stop].all() for segment in segments
    )


def _rows_of(windows: Candidates, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    if chosen.size == 0:
        return np.empty(0, dtype=np.int64)
    sizes = windows.stops[chosen] - windows.starts[chosen]
    # Row by row: its window's first row, and its place in the window.
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows: NDArray[np.int64] = np.repeat(windows.starts[chosen], sizes) + np.arange(int(sizes.sum())) - before
    return rows


def select_rows(
    segments: Sequence[Segment],
    flags: NDArray[np.uint8],
    policy: ReusePolicy | None,
    *,
    window: int,
    scores: NDArray[np.float64] | None,
    live_scores: bool,
    top_entries: int,
) -> RowPlan:
    """The class of every row.

    Args:
        flags: what `protect` returned.
        scores: [E] Indexer score of every compressed entry of the sequence, best is most; None ranks in request order.
        live_scores: the scores were computed in this request by the leading fence. Otherwise they are the salience
            kept in the artifacts: then I_top is empty and they only rank the candidates.
        top_entries: candidate windows that I_top protects.

    I_top takes the best `top_entries` windows among those nothing else protects, so it holds at least the rows of the
    `top_entries` best entries overall. The budget then activates the best of what is left.
    """
    windows = candidates(segments, flags, window)
    order = np.arange(len(windows.starts)) if scores is None else np.argsort(-scores[windows.entries], kind="stable")
    return select_windows(
        segments, flags, policy, windows=windows, order=order, live_scores=live_scores, top_entries=top_entries
    )


def select_windows(
    segments: Sequence[Segment],
    flags: NDArray[np.uint8],
    policy: ReusePolicy | None,
    *,
    windows: Candidates,
    order: NDArray[np.int64],
    live_scores: bool,
    top_entries: int,
) -> RowPlan:
    """`select_rows` where the candidates are ranked already.

    Args:
        windows: what `candidates` found.
        order: int64 [C], the candidates, best first; equal ones in request order.
    """
    flags = flags.copy()
    top = order[: top_entries if live_scores else 0]
    flags[_rows_of(windows, top)] |= int(Protection.TOP_ENTRIES)
    rest = order[len(top) :]
    sizes = (windows.stops - windows.starts)[rest]
    allowed = int((policy.budget if policy else 0.0) * sizes.sum() + 1e-9)
    active = rest[: int(np.searchsorted(np.cumsum(sizes), allowed, side="right"))]
    classes = np.full(len(flags), RowClass.OMITTED, dtype=np.uint8)
    classes[flags != 0] = RowClass.PROTECTED
    classes[_rows_of(windows, active)] = RowClass.ACTIVE
    return RowPlan(segments=tuple(segments), classes=classes, protections=flags)
