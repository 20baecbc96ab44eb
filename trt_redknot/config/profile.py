"""The split profile: which heads are Global, which layers are fences. Data, validated, hashed."""

from __future__ import annotations

from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.digests import digest_json
from trt_redknot.errors import ConfigError


class SplitProfile(BaseModel):
    """Roles of heads and layers for one geometry.

    Attributes:
        name: shown to people; not part of the digest.
        leading_fence: layers at the start that run every row with every head.
        trailing_fence: the same at the end.
        global_heads: per layer, per output group, the Global head's index inside the group; absent layers use 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    layers: int = Field(ge=1)
    output_groups: int = Field(ge=1)
    heads_per_group: int = Field(ge=1)
    leading_fence: int = Field(ge=0)
    trailing_fence: int = Field(ge=0)
    global_heads: dict[int, tuple[int, ...]] = Field(default_factory=dict)

    @property
    def reusable(self) -> range:
        """Layers whose Local contribution can be restored."""
        return range(self.leading_fence, max(self.leading_fence, self.layers - self.trailing_fence))

    @property
    def trailing_start(self) -> int:
        """First layer of the trailing fence."""
        return self.reusable.stop

    def global_head(self, layer: int, group: int) -> int:
        """Index inside `group` of the Global head of `layer`."""
        heads = self.global_heads.get(layer)
        return 0 if heads is None else heads[group]

    @cached_property
    def digest(self) -> str:
        data = self.model_dump(mode="json", exclude={"name"})
        return digest_json(data)

    @classmethod
    def default(cls, geometry: ModelGeometry, name: str = "auto") -> SplitProfile:
        """Fences of three layers, or as many as leave one reusable layer in a shallow network."""
        fence = min(3, (geometry.layers - 1) // 2)
        return cls(
            name=name,
            layers=geometry.layers,
            output_groups=geometry.output_groups,
            heads_per_group=geometry.heads_per_group,
            leading_fence=fence,
            trailing_fence=fence,
        )

    def check(self, geometry: ModelGeometry) -> None:
        """Raise ConfigError unless the profile fits `geometry`."""
        for key, here, there in (
            ("layers", self.layers, geometry.layers),
            ("output_groups", self.output_groups, geometry.output_groups),
            ("heads_per_group", self.heads_per_group, geometry.heads_per_group),
        ):
            if here != there:
                raise ConfigError(
                    f"the split profile's {key} does not fit the checkpoint",
                    expected=there,
                    found=here,
                    remedy="Use --profile auto, or a profile made for this checkpoint.",
                )
        if self.leading_fence + self.trailing_fence > self.layers:
            raise ConfigError(
                "the split profile's fences overlap",
                expected=f"leading_fence + trailing_fence at most {self.layers}",
                found=self.leading_fence + self.trailing_fence,
            )
        for layer, heads in self.global_heads.items():
            if layer not in self.reusable:
                raise ConfigError(
                    "global_heads names a layer that is not reusable", expected=self.reusable, found=layer
                )
            if len(heads) != self.output_groups or not all(0 <= head < self.heads_per_group for head in heads):
                raise ConfigError(
                    f"global_heads of layer {layer} is ill-formed",
                    expected=f"{self.output_groups} indices from 0 to {self.heads_per_group - 1}",
                    found=list(heads),
                )
