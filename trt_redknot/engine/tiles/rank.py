"""What a rank keeps of artifacts between requests, and how each request reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trt_redknot.artifacts.contents import PartSpec
from trt_redknot.engine.tiles.ahead import ReadAhead
from trt_redknot.engine.tiles.lanes import CopyLane, lane_for
from trt_redknot.engine.tiles.reads import ArtifactReader, DirectReads, TileSource
from trt_redknot.engine.tiles.tier import TierUse, TileTier
from trt_redknot.errors import ConfigError
from trt_redknot.observability.events import Tier


@dataclass(frozen=True, kw_only=True)
class TileOptions:
    """How artifacts reach the device.

    Attributes:
        depth: layers in the ring of tiles that are copied ahead; 0: every tensor is read when its layer asks.
        host_bytes: host memory (pinned, where there is a GPU) for tensors that were read; 0: the store's files and the
            system's page cache only.
        device_bytes: device memory for the artifacts that :meth:`Engine.warm` puts there.
    """

    depth: int
    host_bytes: int = 0
    device_bytes: int = 0

    def __post_init__(self) -> None:
        if self.depth == 1 or min(self.depth, self.host_bytes, self.device_bytes) < 0:
            raise ConfigError(
                "options of artifact tiles make no sense",
                expected="depth 0, or 2 and more; bytes 0 and more",
                found=self,
            )
        if self.depth == 0 and (self.host_bytes or self.device_bytes):
            raise ConfigError("tiers of artifact tiles need a ring", expected="depth of 2 or more", found=self)

    @classmethod
    def default(cls, device: torch.device) -> TileOptions:
        """Ahead of a GPU three layers; a CPU reads where it computes."""
        return cls(depth=3 if device.type == "cuda" else 0)


class Tiles:
    """The tiers of one rank, shared by its requests."""

    def __init__(self, dtype: torch.dtype, device: torch.device, options: TileOptions) -> None:
        self.dtype = dtype
        self._device = device
        self._options = options
        lane = lane_for(device)
        self._host = TileTier(options.host_bytes, lane.staging) if options.host_bytes else None
        self._nearest = TileTier(options.device_bytes, lane.empty) if options.device_bytes else None

    def source(self, lane: CopyLane | None = None) -> TileSource:
        """A source for one request; close it.

        Args:
            lane: where copies run; left out: a lane of the request's own.
        """
        if self._options.depth == 0:
            return DirectReads(self.dtype, self._device)
        return ReadAhead(
            self.dtype,
            self._device,
            lane or lane_for(self._device),
            depth=self._options.depth,
            host=self._host,
            nearest=self._nearest,
        )

    def warm(self, reader: ArtifactReader, parts: Sequence[PartSpec]) -> int:
        """Bring tensors of an artifact into the nearest tier that has a capacity, pushing others out.

        Returns:
            Bytes that are there now.

        Raises:
            ConfigError: there is no such tier.
        """
        tier = self._nearest or self._host
        if tier is None:
            raise ConfigError(
                "the engine keeps no artifacts in memory",
                remedy="Open it with tiles=TileOptions(depth=3, device_bytes=...) or host_bytes=...",
            )
        for spec in parts:
            if tier.find(reader, spec.part, spec.layer) is None:
                tier.keep(reader, spec.part, spec.layer, reader.raw(spec.part, spec.layer))
        # Later ones may have pushed earlier ones out.
        held = [tier.find(reader, spec.part, spec.layer) for spec in parts]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @property
    def use(self) -> dict[str, TierUse]:
        """By tier, what it holds and how often it had what was asked."""
        tiers = {Tier.PINNED.value: self._host, Tier.DEVICE.value: self._nearest}
        return {name: tier.use for name, tier in tiers.items() if tier is not None}
