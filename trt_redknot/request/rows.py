"""Row classes of one request, and the counts every report shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.request.segments import RowClass, Segment, SegmentKind


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """The class of every row of a request.

    Attributes:
        segments: the segment table, in request order, covering all rows.
        classes: uint8 [N], values of :class:`RowClass`.
        protections: uint8 [N], flags of :class:`Protection`; zero on rows that are not protected.
    """

    segments: tuple[Segment, ...]
    classes: NDArray[np.uint8]
    protections: NDArray[np.uint8]

    @property
    def rows(self) -> int:
        return int(self.classes.shape[0])

    def count(self, row_class: RowClass) -> int:
        return int((self.classes == row_class).sum())

    @property
    def prefix_rows(self) -> int:
        """Omitted rows of an exact prefix: they run in no layer at all, fences included."""
        return sum(
            int((self.classes[segment.start : segment.stop] == RowClass.OMITTED).sum())
            for segment in self.segments
            if segment.kind is SegmentKind.PREFIX
        )
