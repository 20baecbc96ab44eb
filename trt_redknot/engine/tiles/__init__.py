"""How artifact tensors reach the device: read where they are used, or copied ahead of the walk through a ring."""

from trt_redknot.engine.tiles.ahead import ReadAhead
from trt_redknot.engine.tiles.lanes import CopyLane, lane_for
from trt_redknot.engine.tiles.rank import TileOptions, Tiles
from trt_redknot.engine.tiles.reads import ArtifactReader, DirectReads, Piece, Read, TileSource
from trt_redknot.engine.tiles.tier import TierUse, TileTier

__all__ = [
    "ArtifactReader",
    "CopyLane",
    "DirectReads",
    "Piece",
    "Read",
    "ReadAhead",
    "TierUse",
    "TileOptions",
    "TileSource",
    "TileTier",
    "Tiles",
    "lane_for",
]
