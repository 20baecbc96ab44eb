"""What a layer is: the attributes its functions read. Derived from the geometry, one per layer."""

from __future__ import annotations

from dataclasses import dataclass

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers of one kind share code, ops, shapes and (in the tensorrt backend) one plan."""

    attention: AttentionKind
    router: RouterKind


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of one network.

    Attributes:
        tau: adaptive fanout threshold of this walk over the layer; 1 is native routing.
        first_expert: id of the first expert this rank holds.
    """

    geometry: ModelGeometry
    layer: int
    tau: float
    first_expert: int

    @property
    def attention(self) -> AttentionKind:
        return self.geometry.attention_kinds[self.layer]

    @property
    def router(self) -> RouterKind:
        return self.geometry.router_kinds[self.layer]

    @property
    def kind(self) -> LayerKind:
        return LayerKind(attention=self.attention, router=self.router)
