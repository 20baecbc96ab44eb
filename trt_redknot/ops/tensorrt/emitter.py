"""The tensorrt backend of the ops: calling an op adds its layers to the network that is being defined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn, cast

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.errors import EngineError
from trt_redknot.ops.reference.packing import latent_row_bytes, row_bytes
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.ops.tensorrt.native import NativeOps
from trt_redknot.ops.tensorrt.plugins import PluginCall, PluginOutput, PluginPort
from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkExperts, NetworkPool, NetworkTensor, Shape, Size
from trt_redknot.ops.tensorrt.writer import NetworkWriter

_SCORING = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}
# Channels of an expert weight that share a scale.
EXPERT_BLOCK = 128
_GATHER, _REDUCE_SCATTER = 0, 1


class RowFormat(IntEnum):
    """Field `format` of plugins that write cache rows (plugins/kernels/norm_rope_pack/params.h)."""

    BFLOAT16 = 0
    PACKED_LATENT = 1
    PACKED_ROW = 2


@dataclass(frozen=True, kw_only=True)
class Calling:
    """What differs between runs of one plan, as tensors of its network; None where the plan does not need it.

    Attributes:
        tau: fp32 [1], adaptive fanout threshold.
        first_expert: int64 [1], id of the first expert held here.
    """

    tau: NetworkTensor | None = None
    first_expert: NetworkTensor | None = None


class EmitterOps(NativeOps):
    """Implements :class:`trt_redknot.ops.interface.Ops` over network tensors.

    Activations are bf16. The values of `tau` and `first` that the layer functions pass are those of one layer and rank;
    the plan serves all of them and reads its own inputs instead.

    Args:
        world: ranks; counts of rows are equal on all of them, the runtime pads.
        packed: cache rows are packed FP8.

    Attributes:
        written: rows for pools of the runtime, by pool.
        faults: fault cells of hash routers.
    """

    def __init__(
        self,
        writer: NetworkWriter,
        port: PluginPort,
        geometry: ModelGeometry,
        calling: Calling,
        *,
        world: int,
        packed: bool,
    ) -> None:
        super().__init__(writer)
        self._port = port
        self._rope_dim = geometry.rope_dim
        self._head_dim = geometry.head_dim
        self._calling = calling
        self._world = world
        self._packed = packed
        self.written: dict[str, NetworkTensor] = {}
        self.faults: list[NetworkTensor] = []

    def hyper_connection_pre(
        self,
        streams_RSM: NetworkTensor,
        fn: NetworkTensor,
        base: NetworkTensor,
        scale: NetworkTensor,
        norm_M: NetworkTensor,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[NetworkTensor, NetworkTensor, NetworkTensor]:
        rows, streams, hidden = streams_RSM.shape[0], streams_RSM.fixed(1), streams_RSM.fixed(2)
        normed, post, comb = self._call(
            "hyper_connection_pre", "HyperConnectionPre",
            {"streams": streams, "hidden": hidden, "iterations": iterations, "eps": eps, "norm_eps": norm_eps},
            {"streams": streams_RSM, "fn": fn, "base": base, "scale": scale, "norm": norm_M},
            normed=(ElementType.BFLOAT16, (rows, hidden)),
            post=(ElementType.FLOAT32, (rows, streams)),
            comb=(ElementType.FLOAT32, (rows, streams, streams)),
        )  # fmt: skip
        return normed, post, comb

    def hyper_connection_post(
        self, streams_RSM: NetworkTensor, output_RM: NetworkTensor, post_RS: NetworkTensor, comb_RSS: NetworkTensor
    ) -> NetworkTensor:
        (mixed,) = self._call(
            "hyper_connection_post", "HyperConnectionPost",
            {"streams": streams_RSM.fixed(1), "hidden": streams_RSM.fixed(2)},
            {"streams": streams_RSM, "output": output_RM, "post": post_RS, "comb": comb_RSS},
            mixed=(ElementType.BFLOAT16, streams_RSM.shape),
        )  # fmt: skip
        return mixed

    def hyper_head(
        self,
        streams_RSM: NetworkTensor,
        fn: NetworkTensor,
        base: NetworkTensor,
        scale: NetworkTensor,
        norm_M: NetworkTensor,
        *,
        eps: float,
        norm_eps: float,
    ) -> NetworkTensor:
        hidden = streams_RSM.fixed(2)
        (normed,) = self._call(
            "hyper_head", "HyperHead",
            {"streams": streams_RSM.fixed(1), "hidden": hidden, "eps": eps, "norm_eps": norm_eps},
            {"streams": streams_RSM, "fn": fn, "base": base, "scale": scale, "norm": norm_M},
            normed=(ElementType.BFLOAT16, (streams_RSM.shape[0], hidden)),
        )  # fmt: skip
        return normed

    def norm_rope_pack(
        self,
        latents_RD: NetworkTensor,
        norm_D: NetworkTensor,
        rope: NetworkTensor,
        positions_R: NetworkTensor,
        *,
        eps: float,
    ) -> NetworkTensor:
        width = latents_RD.fixed(1)
        row_format = RowFormat.PACKED_LATENT if self._packed else RowFormat.BFLOAT16
        (rows,) = self._call(
            "norm_rope_pack", "NormRopePack",
            {"width": width, "rope_dim": self._rope_dim, "format": int(row_format), "eps": eps},
            {"x": latents_RD, "norm": norm_D, "rope": rope, "positions": positions_R},
            rows=self._stored(row_format, latents_RD.shape[0], width),
        )  # fmt: skip
        return rows

    def query_norm(self, q_RHD: NetworkTensor, *, eps: float) -> NetworkTensor:
        (rows,) = self._call(
            "query_norm", "NormRopePack",
            {"width": q_RHD.fixed(2), "heads": q_RHD.fixed(1), "weighted": 0, "eps": eps},
            {"x": q_RHD},
            rows=(ElementType.BFLOAT16, q_RHD.shape),
        )  # fmt: skip
        return rows

    def compress(
        self,
        kv: NetworkTensor,
        gate: NetworkTensor,
        ape: NetworkTensor,
        norm: NetworkTensor,
        rope: NetworkTensor,
        table: CompressTable,
        *,
        eps: float,
    ) -> NetworkTensor:
        width, slots = norm.fixed(0), cast("NetworkTensor", table.slots)
        series = kv.fixed(1) // width
        # Entries are latents and take their format; Indexer keys are plain rows.
        packed = RowFormat.PACKED_LATENT if width == self._head_dim else RowFormat.PACKED_ROW
        row_format = packed if self._packed else RowFormat.BFLOAT16
        (entries,) = self._call(
            "compress", "Compress",
            {"width": width, "series": series, "ratio": slots.fixed(1) // series, "rope_dim": self._rope_dim,
             "format": int(row_format), "eps": eps},
            {"kv": kv, "gate": gate, "ape": ape, "norm": norm, "rope": rope, "slots": slots,
             "positions": cast("NetworkTensor", table.positions)},
            entries=self._stored(row_format, slots.shape[0], width),
        )  # fmt: skip
        return entries

    def write_rows(self, pool: NetworkPool, rows: object, values: NetworkTensor) -> None:
        """The values become an output of the plan; the runtime puts them in their place."""
        self.written[pool.name] = values

    def lightning_indexer(
        self,
        q_RHI: NetworkTensor,
        weights_RH: NetworkTensor,
        keys_EI: NetworkTensor,
        table: AttentionTable,
        rope: NetworkTensor,
        *,
        top_k: int,
    ) -> NetworkTensor:
        _serves("lightning_indexer", heads=(q_RHI.fixed(1), 64), index_dim=(q_RHI.fixed(2), 128))
        (selected,) = self._call(
            "lightning_indexer", "LightningIndexer",
            {"top_k": top_k, "packed": int(keys_EI.type is ElementType.INT8)},
            {"q": q_RHI, "weights": weights_RH, "keys": keys_EI, **_table_inputs(table), "rope": rope},
            selected=(ElementType.INT64, (q_RHI.shape[0], top_k)),
        )  # fmt: skip
        return selected

    def index_salience(self, *_: object, **__: object) -> NoReturn:
        """Salience is asked for by the controller, outside of plans."""
        raise EngineError("op 'index_salience' has no implementation in the tensorrt backend")

    def seg_latent_attention(
        self,
        q_global: NetworkTensor,
        q_local: NetworkTensor,
        table: AttentionTable,
        latents: NetworkTensor,
        entries: NetworkTensor | None,
        selected: NetworkTensor | None,
        sinks_global: NetworkTensor,
        sinks_local: NetworkTensor,
        rope: NetworkTensor,
        *,
        window: int,
    ) -> tuple[NetworkTensor, NetworkTensor]:
        _serves("seg_latent_attention", head_dim=(q_global.fixed(2), 512), rope_dim=(self._rope_dim, 64))
        inputs = {
            "q_global": q_global, "q_local": q_local, **_table_inputs(table), "sinks_global": sinks_global,
            "sinks_local": sinks_local, "rope": rope, "latents": latents,
        }  # fmt: skip
        if entries is not None:
            inputs["entries"] = entries
        if selected is not None:
            inputs["selected"] = selected
        out_global, out_local = self._call(
            "seg_latent_attention", "SegLatentAttention",
            {"global_heads": q_global.fixed(1), "local_heads": q_local.fixed(1), "window": window,
             "entries": int(entries is not None), "selected": int(selected is not None),
             "packed": int(latents.type is ElementType.INT8)},
            inputs,
            out_global=(ElementType.BFLOAT16, q_global.shape),
            out_local=(ElementType.BFLOAT16, q_local.shape),
        )  # fmt: skip
        return out_global, out_local

    def restore_replace(
        self, global_RZ: NetworkTensor, local_R1Z: NetworkTensor, restored: NetworkTensor
    ) -> NetworkTensor:
        (state,) = self._call(
            "restore_replace", "RestoreReplace",
            {"width": global_RZ.fixed(1), "packed": int(restored.type is ElementType.INT8)},
            {"global": global_RZ, "local": local_R1Z, "restored": restored},
            state=(ElementType.BFLOAT16, global_RZ.shape),
        )  # fmt: skip
        return state

    def route_learned(
        self,
        x_RM: NetworkTensor,
        weight_XM: NetworkTensor,
        bias_X: NetworkTensor,
        *,
        top_k: int,
        scale: float,
        scoring: str,
        tau: float,
    ) -> tuple[NetworkTensor, NetworkTensor]:
        assert self._calling.tau is not None, "a plan with a learned router has an input for tau"
        ids, weights = self._call(
            "route_learned", "MoeRouteLearned",
            {"experts": weight_XM.fixed(0), "top_k": top_k, "scale": scale, "scoring": _SCORING[scoring]},
            {"logits": self.linear(x_RM, weight_XM), "bias": bias_X, "tau": self._calling.tau},
            **_routes(x_RM.shape[0], top_k),
        )  # fmt: skip
        return ids, weights

    def route_hash(
        self,
        x_RM: NetworkTensor,
        weight_XM: NetworkTensor,
        table_Vk: NetworkTensor,
        tokens_R: NetworkTensor,
        *,
        scale: float,
        scoring: str,
    ) -> tuple[NetworkTensor, NetworkTensor]:
        top_k = table_Vk.fixed(1)
        ids, weights, faults = self._call(
            "route_hash", "MoeRouteHash",
            {"experts": weight_XM.fixed(0), "top_k": top_k, "scale": scale, "scoring": _SCORING[scoring]},
            {"logits": self.linear(x_RM, weight_XM), "table": self._writer.cast(table_Vk, ElementType.INT64),
             "tokens": tokens_R},
            **_routes(x_RM.shape[0], top_k),
            faults=(ElementType.INT32, (1,)),
        )  # fmt: skip
        self.faults.append(faults)
        return ids, weights

    def experts(
        self,
        x_RM: NetworkTensor,
        ids_Rk: NetworkTensor,
        weights_Rk: NetworkTensor,
        gate_up: NetworkExperts,
        down: NetworkExperts,
        *,
        first: int,
        limit: float,
    ) -> NetworkTensor:
        rows, hidden, top_k = x_RM.shape[0], x_RM.fixed(1), ids_Rk.fixed(1)
        experts, width = down.codes.fixed(0), down.codes.fixed(2)
        if hidden % EXPERT_BLOCK or width % EXPERT_BLOCK:
            raise EngineError(
                "op 'experts' has no implementation in the tensorrt backend for this geometry",
                expected=f"hidden and expert width that {EXPERT_BLOCK} divides", found=f"{hidden} and {width}",
                remedy="Build with --backend torch, which serves every geometry.",
            )  # fmt: skip
        permuted, inverse, ends = self._call(
            "experts", "MoePermute", {"hidden": hidden, "top_k": top_k, "first": 0, "experts": experts},
            {"x": x_RM, "ids": self._held_here(ids_Rk)},
            permuted=(ElementType.BFLOAT16, (_times(rows, top_k), hidden)),
            inverse=(ElementType.INT32, (rows, top_k)),
            ends=(ElementType.INT32, (experts,)),
        )  # fmt: skip
        (activated,) = self._call(
            "experts", "MoeActivation", {"width": width, "experts": experts, "limit": limit},
            {"gate_up": self._grouped_gemm(permuted, ends, gate_up), "ends": ends},
            activated=(ElementType.BFLOAT16, (permuted.shape[0], width)),
        )  # fmt: skip
        (total,) = self._call(
            "experts", "MoeCombine", {"hidden": hidden, "top_k": top_k},
            {"y": self._grouped_gemm(activated, ends, down), "inverse": inverse, "weights": weights_Rk},
            sum=(ElementType.BFLOAT16, (rows, hidden)),
        )  # fmt: skip
        return total

    def _held_here(self, ids_Rk: NetworkTensor) -> NetworkTensor:
        """Ids counted from this rank's first expert, so that plans do not depend on the rank; others stay outside."""
        first = self._calling.first_expert
        assert first is not None, "a plan with experts has an input for their first id"
        kinds = self._writer.module.ElementWiseOperation
        return self._writer.elementwise(ids_Rk, self._writer.reshape(first, (1, 1)), kinds.SUB)

    def _grouped_gemm(self, x: NetworkTensor, ends: NetworkTensor, weight: NetworkExperts) -> NetworkTensor:
        experts, width, depth = (weight.codes.fixed(axis) for axis in range(3))
        (out,) = self._call(
            "experts", "MoeGroupedGemm", {"experts": experts, "depth": depth, "width": width},
            {"x": x, "ends": ends, "weight": weight.codes, "weight_scale": weight.scales},
            out=(ElementType.BFLOAT16, (x.shape[0], width)),
        )  # fmt: skip
        return out

    def all_gather(self, own: NetworkTensor, counts: Sequence[int]) -> NetworkTensor:
        return self._collective("all_gather", _GATHER, own, _times(own.shape[0], self._world))

    def reduce_scatter(self, partial: NetworkTensor, counts: Sequence[int]) -> NetworkTensor:
        return self._collective("reduce_scatter", _REDUCE_SCATTER, partial, _share(partial.shape[0], self._world))

    def _collective(self, op: str, kind: int, x: NetworkTensor, rows: int | Size) -> NetworkTensor:
        if self._world == 1:
            return x
        (result,) = self._call(
            op, "Collective", {"kind": kind, "group": 0, "world": self._world}, {"source": x},
            result=(x.type, (rows, *x.shape[1:])),
        )  # fmt: skip
        return result

    def _stored(self, row_format: RowFormat, rows: int | Size, width: int) -> tuple[ElementType, Shape]:
        if row_format is RowFormat.BFLOAT16:
            return ElementType.BFLOAT16, (rows, width)
        packed_latent = row_format is RowFormat.PACKED_LATENT
        return ElementType.INT8, (rows, latent_row_bytes(width, self._rope_dim) if packed_latent else row_bytes(width))

    def _call(
        self,
        op: str,
        plugin: str,
        fields: dict[str, int | float],
        inputs: dict[str, NetworkTensor],
        **outputs: tuple[ElementType, Shape],
    ) -> tuple[NetworkTensor, ...]:
        described = tuple(PluginOutput(name=name, type=type_, shape=shape) for name, (type_, shape) in outputs.items())
        call = PluginCall(op=op, plugin=plugin, fields=fields, inputs=inputs, outputs=described)
        return self._port.add(self._writer, call)


def _table_inputs(table: AttentionTable) -> dict[str, NetworkTensor]:
    # The table's fields are network tensors here.
    fields: Any = table
    return {
        "segments": fields.segments, "row_segments": fields.row_segments, "positions": fields.positions,
        "visible": fields.visible,
    }  # fmt: skip


def _routes(rows: int | Size, top_k: int) -> dict[str, tuple[ElementType, Shape]]:
    return {"ids": (ElementType.INT64, (rows, top_k)), "weights": (ElementType.FLOAT32, (rows, top_k))}


def _serves(op: str, **sizes: tuple[int, int]) -> None:
    """Raise EngineError unless each size is the one that the op's kernel was written for."""
    if any(found != served for found, served in sizes.values()):
        raise EngineError(
            f"op {op!r} has no implementation in the tensorrt backend for this geometry",
            expected=", ".join(f"{name} {served}" for name, (_, served) in sizes.items()),
            found=", ".join(f"{name} {found}" for name, (found, _) in sizes.items()),
            remedy="Build with --backend torch, which serves every geometry.",
        )


def _times(rows: int | Size, factor: int) -> int | Size:
    if isinstance(rows, int):
        return rows * factor
    return Size(extent=rows.extent, factor=rows.factor * factor)


def _share(rows: int | Size, parts: int) -> int | Size:
    if isinstance(rows, int):
        return rows // parts
    assert rows.factor % parts == 0, f"{rows} rows over {parts} ranks"
    return Size(extent=rows.extent, factor=rows.factor // parts)
