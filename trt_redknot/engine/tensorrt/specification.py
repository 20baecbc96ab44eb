"""What goes into and comes out of every plan: names, element types, shapes, and the ranges of sizes that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.engine.pool import raw_widths
from trt_redknot.engine.tensorrt.stages import PlanKind, Stage
from trt_redknot.engine.weights import stored_tensors
from trt_redknot.errors import EngineError
from trt_redknot.ops.reference.packing import latent_pitch, row_bytes
from trt_redknot.ops.tensorrt.tensors import ElementType, Extent, Shape, Size

# Weights of a layer, by the stage that reads them; a trailing dot means all names that begin so.
_STAGE_WEIGHTS = {
    Stage.PROJECT: (
        "attn_hc.", "attn_norm", "attn.q_a", "attn.q_norm", "attn.kv", "attn.kv_norm", "compressor.kv",
        "compressor.gate", "indexer.kv", "indexer.gate", "indexer.weights",
    ),
    Stage.COMPRESS: ("compressor.ape", "compressor.norm", "indexer.ape", "indexer.norm"),
    Stage.SELECT: ("indexer.q_b",),
    Stage.ATTEND: ("attn.q_b", "attn.sinks", "attn.o_a", "attn.o_b"),
    Stage.MIX: ("ffn_hc.", "ffn_norm", "router.", "experts.", "shared."),
    Stage.EMBED: ("embed",),
    Stage.HEAD: ("hc_head.", "norm", "head"),
}  # fmt: skip
# Bytes travel as int8: every TensorRT release moves those between plugins.
_STORED = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.int32: ElementType.INT32,
    torch.float8_e4m3fn: ElementType.INT8,
}


@dataclass(frozen=True, kw_only=True)
class PlanTensor:
    """One input or output of a plan.

    Attributes:
        weight: the tensor is a weight of the layer, bound once and never written.
    """

    name: str
    type: ElementType
    shape: Shape
    weight: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanFormat:
    """How the caches that plans read and write are stored, and how their rows move between ranks.

    Attributes:
        packed_cache: latents, entries and Indexer keys are packed FP8 rows, else bf16.
        packed_local: restored Local contributions are packed FP8 rows, else bf16.
        native_collectives: rows move between ranks by TensorRT's own layers (11 and newer), else by our plugin.
    """

    packed_cache: bool = False
    packed_local: bool = False
    native_collectives: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """One plan of one geometry over `world` ranks."""

    kind: PlanKind
    geometry: ModelGeometry
    world: int
    format: PlanFormat
    inputs: tuple[PlanTensor, ...] = field(default=())
    outputs: tuple[PlanTensor, ...] = field(default=())


def plan_spec(geometry: ModelGeometry, kind: PlanKind, *, world: int, format: PlanFormat) -> PlanSpec:
    """The specification of one plan.

    Raises:
        EngineError: the ranks do not share the output groups or the experts evenly: plans are the same on all ranks.
    """
    for name, count in (("output groups", geometry.output_groups), ("experts", geometry.experts)):
        if count % world:
            raise EngineError(
                f"plans are the same on every rank, and {world} ranks do not share the {name} evenly",
                expected=f"a number of ranks that divides {count}", found=world,
            )  # fmt: skip
    shapes = _Shapes(geometry, kind, world, format)
    runtime = _RUNTIME[kind.stage](shapes)
    weights = tuple(_weights(geometry, kind, world))
    return PlanSpec(
        kind=kind, geometry=geometry, world=world, format=format, inputs=(*runtime.inputs, *weights),
        outputs=runtime.outputs,
    )  # fmt: skip


def needs_other_ranks(spec: PlanSpec) -> bool:
    """Whether a plan has collectives, and one rank cannot run it alone."""
    return spec.world > 1 and spec.kind.stage in (Stage.SELECT, Stage.MIX)


def _weights(geometry: ModelGeometry, kind: PlanKind, world: int) -> Iterable[PlanTensor]:
    layers, names = kind.layers(geometry), _STAGE_WEIGHTS[kind.stage]
    layer = layers[0] if layers else None
    for tensor in stored_tensors(geometry, layer, 0, world, torch.bfloat16, fp8_experts=True):
        if any(tensor.source == name or (name[-1] == "." and tensor.source.startswith(name)) for name in names):
            # Ranks may hold unequal shares of the vocabulary.
            share = Size(extent=Extent.VOCABULARY_SHARE)
            shape: Shape = (share, *tensor.shape[1:]) if tensor.name == "head" else tensor.shape
            yield PlanTensor(name=tensor.name, type=_STORED[tensor.dtype], shape=shape, weight=True)


@dataclass(frozen=True, kw_only=True)
class _Runtime:
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]


class _Shapes:
    """Tensors that several stages share, for one kind of plan."""

    def __init__(self, geometry: ModelGeometry, kind: PlanKind, world: int, format: PlanFormat) -> None:
        self.g = geometry
        self.kind = kind
        self.world = world
        self.format = format
        self.own = Size(extent=Extent.OWN_ROWS)
        self.all = Size(extent=Extent.OWN_ROWS, factor=world)
        self.rows = Size(extent=Extent.ROWS)

    def floats(self, name: str, *shape: int | Size) -> PlanTensor:
        return PlanTensor(name=name, type=ElementType.BFLOAT16, shape=shape)

    def wide(self, name: str, *shape: int | Size) -> PlanTensor:
        return PlanTensor(name=name, type=ElementType.FLOAT32, shape=shape)

    def integers(self, name: str, *shape: int | Size) -> PlanTensor:
        return PlanTensor(name=name, type=ElementType.INT64, shape=shape)

    def streams(self, name: str, rows: Size) -> PlanTensor:
        return self.floats(name, rows, self.g.streams, self.g.hidden)

    def mixing(self) -> tuple[PlanTensor, PlanTensor]:
        s = self.g.streams
        return self.wide("attn_post", self.own, s), self.wide("attn_comb", self.own, s, s)

    def rope(self) -> PlanTensor:
        return self.wide("rope", Size(extent=Extent.POSITIONS), self.g.rope_dim // 2, 2)

    def latents(self, name: str, rows: Size) -> PlanTensor:
        if self.format.packed_cache:
            shape = (rows, latent_pitch(self.g.head_dim, self.g.rope_dim))
            return PlanTensor(name=name, type=ElementType.INT8, shape=shape)
        return self.floats(name, rows, self.g.head_dim)

    def index_keys(self, rows: Size) -> PlanTensor:
        if self.format.packed_cache:
            return PlanTensor(name="index_keys", type=ElementType.INT8, shape=(rows, row_bytes(self.g.index_dim)))
        return self.floats("index_keys", rows, self.g.index_dim)

    def table(self, rows: Size) -> tuple[PlanTensor, ...]:
        return (
            self.integers("segments", Size(extent=Extent.SEGMENTS), 5),
            self.integers("row_segments", rows, 2),
            self.integers("positions", rows),
            self.integers("visible", rows),
        )

    def raw(self, rows: Size) -> tuple[PlanTensor, ...]:
        widths = raw_widths(self.g, self.kind.layers(self.g)[0])
        return tuple(self.floats(f"raw.{index}", rows, width) for index, width in enumerate(widths))


def _embed(s: _Shapes) -> _Runtime:
    return _Runtime(inputs=(s.integers("tokens", s.own),), outputs=(s.streams("streams", s.own),))


def _project(s: _Shapes) -> _Runtime:
    outputs = (
        s.floats("query_latent", s.own, s.g.q_lora_rank), s.latents("latent", s.own), *s.mixing(), *s.raw(s.own)
    )  # fmt: skip
    if s.kind.attention is AttentionKind.CSA:
        outputs = (*outputs, s.floats("index_weights", s.own, s.g.index_heads))
    return _Runtime(inputs=(s.streams("streams", s.own), s.integers("frames", s.own), s.rope()), outputs=outputs)


def _compress(s: _Shapes) -> _Runtime:
    written = Size(extent=Extent.WRITTEN_ENTRIES)
    csa = s.kind.attention is AttentionKind.CSA
    slots = 2 * s.g.csa_ratio if csa else s.g.hca_ratio
    return _Runtime(
        inputs=(
            *s.raw(Size(extent=Extent.RAW_ROWS)), s.integers("slots", written, slots), s.integers("frames", written),
            s.rope(),
        ),
        outputs=(s.latents("entries", written), *((s.index_keys(written),) if csa else ())),
    )  # fmt: skip


def _select(s: _Shapes) -> _Runtime:
    return _Runtime(
        inputs=(
            s.floats("query_latent", s.own, s.g.q_lora_rank), s.floats("index_weights", s.own, s.g.index_heads),
            s.index_keys(Size(extent=Extent.ENTRY_POOL)), *s.table(s.own), s.rope(),
        ),
        outputs=(s.integers("selected", s.all, s.g.index_topk),),
    )  # fmt: skip


def _attend(s: _Shapes) -> _Runtime:
    width = s.g.projected // s.world
    restored = s.floats("restored", Size(extent=Extent.RESTORED_ROWS), width)
    if s.format.packed_local:
        restored = PlanTensor(name="restored", type=ElementType.INT8, shape=(restored.shape[0], row_bytes(width)))
    pools = [s.latents("latents", Size(extent=Extent.LATENT_POOL))]
    if s.kind.attention is not AttentionKind.SLIDING:
        pools.append(s.latents("entries", Size(extent=Extent.ENTRY_POOL)))
    if s.kind.attention is AttentionKind.CSA:
        pools.append(s.integers("selected", s.rows, s.g.index_topk))
    return _Runtime(
        inputs=(s.floats("query_latent", s.rows, s.g.q_lora_rank), *s.table(s.rows), *pools, restored, s.rope()),
        outputs=(
            s.floats("partial", s.rows, s.g.hidden), s.floats("local", Size(extent=Extent.FULL_ROWS), width),
        ),
    )  # fmt: skip


def _mix(s: _Shapes) -> _Runtime:
    hashed = s.kind.router is RouterKind.HASH
    choice = s.integers("tokens", s.own) if hashed else s.wide("tau", 1)
    outputs = [s.streams("mixed", s.own), s.integers("expert_ids", s.own, s.g.experts_per_token)]
    if hashed:
        outputs.append(PlanTensor(name="faults", type=ElementType.INT32, shape=(1,)))
    return _Runtime(
        inputs=(
            s.streams("streams", s.own), *s.mixing(), s.floats("partial", s.all, s.g.hidden),
            s.integers("first_expert", 1), choice,
        ),
        outputs=tuple(outputs),
    )  # fmt: skip


def _head(s: _Shapes) -> _Runtime:
    logits = s.floats("logits", s.rows, Size(extent=Extent.VOCABULARY_SHARE))
    return _Runtime(inputs=(s.streams("streams", s.rows),), outputs=(logits,))


_RUNTIME: dict[Stage, Callable[[_Shapes], _Runtime]] = {
    Stage.EMBED: _embed,
    Stage.PROJECT: _project,
    Stage.COMPRESS: _compress,
    Stage.SELECT: _select,
    Stage.ATTEND: _attend,
    Stage.MIX: _mix,
    Stage.HEAD: _head,
}
