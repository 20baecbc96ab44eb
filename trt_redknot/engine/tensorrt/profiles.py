"""Optimization profiles: ranges of every size that changes from call to call, for prefill chunks and for decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.tensorrt.stages import Stage
from trt_redknot.errors import EngineError
from trt_redknot.ops.tensorrt.tensors import Extent, Shape, Size
from trt_redknot.partition import even_split

# A row that runs all heads and one that does not are always there: what the chunk lacks is padded.
_PAD_ROWS = 2
# Plans index tensors with 31 bits.
_MOST_ROWS = 2**21


class Phase(StrEnum):
    """One optimization profile each, in this order."""

    PREFILL = "prefill"
    DECODE = "decode"


class Range(NamedTuple):
    """Least, most common and largest size."""

    least: int
    common: int
    most: int

    def times(self, factor: int) -> Range:
        return Range(*(size * factor for size in self))


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What plans must be able to hold.

    Attributes:
        chunk_rows: rows of a prefill chunk, over all ranks.
        max_length: tokens of a request.
        decode_rows: sequences that are decoded together.
        segments: segments of all requests of a batch.
        pool_tokens: tokens of all requests that are open together; None: of one as long as `max_length`.
    """

    chunk_rows: int
    max_length: int
    decode_rows: int = 64
    segments: int = 4096
    pool_tokens: int | None = None

    @property
    def pool_rows(self) -> int:
        """Rows of the pool of latents."""
        return self.pool_tokens or self.max_length

    def __post_init__(self) -> None:
        for name, value in (
            ("chunk_rows", self.chunk_rows), ("max_length", self.max_length), ("pool_tokens", self.pool_rows)
        ):  # fmt: skip
            if not 1 <= value <= _MOST_ROWS:
                raise EngineError(
                    f"the tensorrt backend cannot plan for this {name}", expected=f"1 to {_MOST_ROWS}", found=value,
                    remedy=f"Choose another --{name.replace('_', '-')}.",
                )  # fmt: skip


def profile_ranges(
    geometry: ModelGeometry, stage: Stage, limits: PlanLimits, world: int, phase: Phase
) -> Mapping[Extent, Range]:
    """The range of every extent in one profile."""
    step = limits.chunk_rows if phase is Phase.PREFILL else limits.decode_rows
    own = -(-(step + _PAD_ROWS) // world)
    rows = own * world
    # Entries end in a partial window by segment; a window that is not finished yet takes one more.
    ratio = min(geometry.csa_ratio, geometry.hca_ratio)
    entries = limits.pool_rows // ratio + limits.segments + 1
    # A sequence that is decoded keeps a window of raw rows beside its new one.
    window = geometry.hca_ratio + 1
    raw = limits.max_length + geometry.hca_ratio if phase is Phase.PREFILL else limits.decode_rows * window
    written = entries if phase is Phase.PREFILL else limits.decode_rows
    if stage is Stage.HEAD:
        rows = max(limits.decode_rows, _PAD_ROWS)
    shares = [len(share) for share in even_split(geometry.vocab, world)]
    common_pool = min(limits.max_length, 65536, limits.pool_rows)
    return {
        Extent.OWN_ROWS: _up_to(own),
        Extent.ROWS: Range(1 if stage is Stage.HEAD else _PAD_ROWS, rows, rows),
        # Most rows of a chunk run all heads; the rest restores.
        Extent.FULL_ROWS: Range(1, rows - max(1, rows // 4), rows - 1),
        Extent.RESTORED_ROWS: Range(1, max(1, rows // 4), rows - 1),
        Extent.RAW_ROWS: Range(1, min(step, raw), raw),
        Extent.WRITTEN_ENTRIES: Range(1, min(-(-step // ratio), written), written),
        Extent.LATENT_POOL: Range(1, common_pool, limits.pool_rows),
        Extent.ENTRY_POOL: Range(1, max(1, common_pool // ratio), entries),
        Extent.SEGMENTS: Range(1, min(16, limits.segments), limits.segments),
        Extent.POSITIONS: Range(1, common_pool, limits.max_length),
        Extent.VOCABULARY_SHARE: Range(min(shares), max(shares), max(shares)),
    }


def shape_ranges(shape: Shape, ranges: Mapping[Extent, Range]) -> tuple[tuple[int, ...], ...] | None:
    """Least, most common and largest shape of a tensor; None where nothing of it changes."""
    if all(isinstance(size, int) for size in shape):
        return None
    sizes = [
        ranges[size.extent].times(size.factor) if isinstance(size, Size) else Range(size, size, size) for size in shape
    ]
    return tuple(zip(*sizes, strict=True))


def _up_to(most: int) -> Range:
    return Range(1, most, most)
