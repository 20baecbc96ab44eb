"""What a row may see of a segment table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trt_redknot.request.segments import Segment


def visible_entries(segments: Sequence[Segment], positions: NDArray[np.int64], ratio: int) -> NDArray[np.int64]:
    """Compressed entries a row at each position may see: those whose window's last token is at or before it. The
    partial window of a document is seen once the whole document is before the row."""
    if ratio == 0 or not len(positions):
        return np.zeros(len(positions), dtype=np.int64)
    starts = np.array([segment.start for segment in segments])
    full = np.array([segment.length // ratio for segment in segments])
    entries = np.array([segment.entries(ratio) for segment in segments])
    own = np.searchsorted(starts, positions, side="right") - 1
    # All of the segments before the row's own: they end before it. Of its own, the full windows that it has finished.
    visible: NDArray[np.int64] = np.minimum((positions - starts[own] + 1) // ratio, full[own])
    visible += (np.cumsum(entries) - entries)[own]
    return visible
