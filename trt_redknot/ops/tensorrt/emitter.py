"""The tensorrt backend of the ops: calling an op adds its layers to the network that is being defined."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NoReturn, cast

from trt_redknot.errors import EngineError
from trt_redknot.ops.reference.packing import latent_pitch, row_bytes
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.ops.tensorrt.calls import serves
from trt_redknot.ops.tensorrt.experts import ExpertOps
from trt_redknot.ops.tensorrt.tensors import ElementType, NetworkPool, NetworkTensor, Shape, Size


class RowFormat(IntEnum):
    """Field `format` of plugins that write cache rows (plugins/kernels/norm_rope_pack/params.h)."""

    BFLOAT16 = 0
    PACKED_LATENT = 1
    PACKED_ROW = 2


class EmitterOps(ExpertOps):
    """Implements :class:`trt_redknot.ops.interface.Ops` over network tensors.

    Activations are bf16. The values of `tau` and `first` that the layer functions pass are those of one layer and rank;
    the plan serves all of them and reads its own inputs instead.
    """

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
        serves("lightning_indexer", heads=(q_RHI.fixed(1), 64), index_dim=(q_RHI.fixed(2), 128))
        (selected,) = self._call(
            "lightning_indexer", "LightningIndexer",
            {"top_k": top_k, "packed": int(keys_EI.type is ElementType.INT8)},
            {"q": q_RHI, "weights": weights_RH, "keys": keys_EI, **_table_inputs(table), "rope": rope},
            selected=(ElementType.INT64, (q_RHI.shape[0], top_k)),
        )  # fmt: skip
        return selected

    def turn_rows(self, *_: object, **__: object) -> NoReturn:
        """Rows of documents are turned by the controller, outside of plans."""
        raise EngineError("op 'turn_rows' has no implementation in the tensorrt backend")

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
        serves("seg_latent_attention", head_dim=(q_global.fixed(2), 512), rope_dim=(self._rope_dim, 64))
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

    def _stored(self, row_format: RowFormat, rows: int | Size, width: int) -> tuple[ElementType, Shape]:
        if row_format is RowFormat.BFLOAT16:
            return ElementType.BFLOAT16, (rows, width)
        packed_latent = row_format is RowFormat.PACKED_LATENT
        return ElementType.INT8, (rows, latent_pitch(width, self._rope_dim) if packed_latent else row_bytes(width))


def _table_inputs(table: AttentionTable) -> dict[str, NetworkTensor]:
    # The table's fields are network tensors here.
    fields: Any = table
    return {
        "segments": fields.segments, "row_segments": fields.row_segments, "positions": fields.positions,
        "visible": fields.visible,
    }  # fmt: skip
