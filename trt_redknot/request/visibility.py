"""What a row may see of a segment table (design section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trt_redknot.request.segments import Segment


def visible_entries(segments: Sequence[Segment], positions: NDArray[np.int64], ratio: int) -> NDArray[np.int64]:
    """Compressed entries a row at each position may see: those whose window's last token is at or before it. The
    partial window of a document is seen once the whole document is before the row."""
    visible = np.zeros(len(positions), dtype=np.int64)
    if ratio == 0:
        return visible
    for segment in segments:
        full = segment.length // ratio
        visible += np.clip((positions - segment.start + 1) // ratio, 0, full)
        if segment.entries(ratio) > full:
            visible += positions >= segment.stop
    return visible
