"""What every pass of an engine needs of the rank it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.bundles import BundleCache
from trt_redknot.engine.executor import StageExecutor
from trt_redknot.engine.tiles import Tiles
from trt_redknot.engine.walk import LayerWalk
from trt_redknot.ops.interface import Ops


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a pass needs of the rank it runs on; never looked up, always handed in.

    Attributes:
        packed_cache: pools hold packed FP8 rows.
        bundles: what earlier requests worked out for the same documents.
    """

    geometry: ModelGeometry
    profile: SplitProfile
    stages: StageExecutor
    walk: LayerWalk
    ops: Ops
    collectives: Collectives
    local_width: int
    chunk_rows: int
    dtype: torch.dtype
    device: torch.device
    tiles: Tiles
    packed_cache: bool = False
    bundles: BundleCache = field(default_factory=BundleCache)
