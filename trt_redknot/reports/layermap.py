"""The layer walk of a request as numbers: which share of the rows each layer runs, and with which heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.config.profile import SplitProfile
from trt_redknot.reports.ledgers import Epilogue, rows_of_layer
from trt_redknot.request.rows import RowPlan

Zone = Literal["leading fence", "reusable", "trailing fence"]


@dataclass(frozen=True, kw_only=True)
class LayerBar:
    """One layer: rows that run with all heads, with the Global heads only, and not at all."""

    layer: int
    zone: Zone
    attention: AttentionKind
    router: RouterKind
    all_heads: int
    global_heads: int
    absent: int


@dataclass(frozen=True, kw_only=True)
class ZoneSpan:
    """Neighbouring layers of one zone."""

    zone: Zone
    first: int
    layers: int


def layer_bars(
    geometry: ModelGeometry, profile: SplitProfile, plan: RowPlan, epilogue: Epilogue
) -> tuple[LayerBar, ...]:
    """One bar a layer, in order."""
    bars = []
    for layer in range(geometry.layers):
        rows = rows_of_layer(profile, plan, epilogue, layer)
        every, some = int(rows.all_heads.sum()), int(rows.global_heads.sum())
        bars.append(
            LayerBar(
                layer=layer,
                zone=_zone(profile, layer),
                attention=geometry.attention_kinds[layer],
                router=geometry.router_kinds[layer],
                all_heads=every,
                global_heads=some,
                absent=plan.rows - every - some,
            )
        )
    return tuple(bars)


def zone_spans(bars: Sequence[LayerBar]) -> tuple[ZoneSpan, ...]:
    """The zones of the walk, in order."""
    spans = []
    for zone, members in groupby(bars, key=lambda bar: bar.zone):
        layers = list(members)
        spans.append(ZoneSpan(zone=zone, first=layers[0].layer, layers=len(layers)))
    return tuple(spans)


def _zone(profile: SplitProfile, layer: int) -> Zone:
    if layer in profile.reusable:
        return "reusable"
    return "leading fence" if layer < profile.leading_fence else "trailing fence"
