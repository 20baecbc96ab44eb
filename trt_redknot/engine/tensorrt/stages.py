"""The stages of a layer as functions from named tensors to named tensors, over any backend of the ops.

Each stage is one plan of the tensorrt backend. The same function run with another backend says what a plan must give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.model import layers as model
from trt_redknot.model.layers import Projected
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops, RowCount, Tensor
from trt_redknot.ops.tables import AttentionTable, CompressTable


class Stage(StrEnum):
    """What one plan does (:mod:`trt_redknot.model.layers`). SELECT is the Indexer's part of attention, on own rows."""

    EMBED = "embed"
    PROJECT = "project"
    COMPRESS = "compress"
    SELECT = "select"
    ATTEND = "attend"
    MIX = "mix"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class PlanKind:
    """One plan serves every layer of its kind. Attention decides the stages before the router, the router the mix."""

    stage: Stage
    attention: AttentionKind | None = None
    router: RouterKind | None = None

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.stage, self.attention, self.router) if part is not None)

    def layers(self, geometry: ModelGeometry) -> tuple[int, ...]:
        """Layers that run this plan; none for the embedding and the head."""
        if self.stage in (Stage.EMBED, Stage.HEAD):
            return ()
        return tuple(
            layer
            for layer in range(geometry.layers)
            if self.attention in (None, geometry.attention_kinds[layer])
            and self.router in (None, geometry.router_kinds[layer])
        )


def plan_kinds(geometry: ModelGeometry) -> tuple[PlanKind, ...]:
    """The plans that a network needs, in the order in which a forward pass first runs them."""
    kinds = [PlanKind(stage=Stage.EMBED)]
    for attention in dict.fromkeys(geometry.attention_kinds):
        stages = [Stage.PROJECT, Stage.COMPRESS, Stage.SELECT, Stage.ATTEND]
        if attention is not AttentionKind.CSA:
            stages.remove(Stage.SELECT)
        if attention is AttentionKind.SLIDING:
            stages.remove(Stage.COMPRESS)
        kinds += [PlanKind(stage=stage, attention=attention) for stage in stages]
    kinds += [PlanKind(stage=Stage.MIX, router=router) for router in dict.fromkeys(geometry.router_kinds)]
    return (*kinds, PlanKind(stage=Stage.HEAD))


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """One run of a stage.

    Attributes:
        tensors: inputs and weights by the names of the plan's specification.
        full_rows: rows of the chunk that run all heads; used by ATTEND.
        counts: rows each rank owns; used by SELECT and MIX.
        pools: where COMPRESS writes entries and Indexer keys, and the pool rows (`entry_rows`) it writes.
    """

    spec: LayerSpec
    tensors: Mapping[str, Tensor]
    full_rows: RowCount = 0
    counts: tuple[int, ...] = ()
    pools: Mapping[str, Any] | None = None


def run_stage(ops: Ops, stage: Stage, run: StageRun) -> dict[str, Tensor]:
    """The stage's outputs by name. What COMPRESS writes goes to its pools instead."""
    return {
        Stage.EMBED: _embed,
        Stage.PROJECT: _project,
        Stage.COMPRESS: _compress,
        Stage.SELECT: _select,
        Stage.ATTEND: _attend,
        Stage.MIX: _mix,
        Stage.HEAD: _head,
    }[stage](ops, run)


def _embed(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    tensors = run.tensors
    return {"streams": ops.embed(tensors["tokens"], tensors["embed"], streams=run.spec.geometry.streams)}


def _project(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    t = run.tensors
    own = model.project(ops, run.spec, t, t["streams"], t["frames"], t["rope"])
    outputs = {"query_latent": own.query_latent, "latent": own.latent, "attn_post": own.post, "attn_comb": own.comb}
    outputs |= {f"raw.{index}": rows for index, rows in enumerate(own.raw)}
    if own.index_weights is not None:
        outputs["index_weights"] = own.index_weights
    return outputs


def _compress(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    t, pools = run.tensors, run.pools
    assert pools is not None, "compress writes into pools"
    raw = [t[name] for name in sorted(name for name in t if name.startswith("raw."))]
    table = CompressTable(entries=pools["entry_rows"], slots=t["slots"], positions=t["frames"])
    model.compress(ops, run.spec, t, raw, table, pools["entries"], pools.get("index_keys"), t["rope"])
    return {}


def _select(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    t = run.tensors
    own = Projected(
        query_latent=t["query_latent"], latent=None, post=None, comb=None, raw=(), index_weights=t["index_weights"]
    )
    table = _table(t)
    return {"selected": model.select_entries(ops, run.spec, t, own, t["index_keys"], table, t["rope"], run.counts)}


def _attend(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    t, online = run.tensors, list[Tensor]()
    partial = model.attend(
        ops, run.spec, t, t["query_latent"], run.full_rows, _table(t), t["latents"], t.get("entries"),
        t.get("selected"), t["restored"], t["rope"], tap=online.append,
    )  # fmt: skip
    return {"partial": partial, "local": online[0]}


def _mix(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    t = run.tensors
    own = Projected(
        query_latent=None, latent=None, post=t["attn_post"], comb=t["attn_comb"], raw=(), index_weights=None
    )
    streams, ids = model.mix(ops, run.spec, t, t["streams"], own, t["partial"], t.get("tokens"), run.counts)
    return {"mixed": streams, "expert_ids": ids}


def _head(ops: Ops, run: StageRun) -> dict[str, Tensor]:
    return {"logits": model.head(ops, run.spec.geometry, run.tensors, run.tensors["streams"])}


def _table(t: Mapping[str, Tensor]) -> AttentionTable:
    return AttentionTable(
        segments=t["segments"], row_segments=t["row_segments"], positions=t["positions"], visible=t["visible"]
    )
