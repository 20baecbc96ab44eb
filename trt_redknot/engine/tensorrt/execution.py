"""The stages of a layer computed by plans: inputs by name, rows padded as plans need them, results cut back.

Plans know no empty tensors, give every rank equally many rows, and always have a row that runs all heads and one that
takes a restored Local contribution (:mod:`trt_redknot.engine.tensorrt.specification`). The walk knows none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.engine.cache_rows import CacheRows
from trt_redknot.engine.tensorrt.backend import PlanBackend, Tensors
from trt_redknot.engine.tensorrt.padding import joined, last_row_again, padded, padded_table, spread
from trt_redknot.engine.tensorrt.profiles import Phase, profile_ranges
from trt_redknot.engine.tensorrt.stages import PlanKind, Stage
from trt_redknot.errors import EngineError
from trt_redknot.model import layers as model
from trt_redknot.model.layers import Projected, Weights
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops
from trt_redknot.ops.reference.packing import pack_rows
from trt_redknot.ops.tables import AttentionTable, CompressTable
from trt_redknot.ops.tensorrt.tensors import Extent


class PlanExecutor:
    """Implements :class:`trt_redknot.engine.executor.StageExecutor` over plans.

    Args:
        plans: of the engine.
        layers: by layer, this rank's tensors by the names of the plans' inputs.
        shared: its tensors outside the layers.
        ropes: by attention kind, fp32 cos and sin of every position: [positions, P / 2, 2].
        ops: what is no plan: scores for the controller, and writes into the pools.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        plans: PlanBackend,
        layers: Sequence[Weights],
        shared: Weights,
        ropes: Mapping[AttentionKind, torch.Tensor],
        ops: Ops,
    ) -> None:
        self._runtime = plans.runtime
        self._ropes = ropes
        self._ops = ops
        self._format = plans.specs[0].format
        dtype = ropes[AttentionKind.SLIDING].dtype
        self._cache = CacheRows(geometry=geometry, dtype=dtype, packed=self._format.packed_cache)
        self._limits = limits = plans.limits
        self._layers = layers
        self._weights: dict[tuple[str, int | None], Tensors] = {}
        for spec in plans.specs:
            names = [tensor.name for tensor in spec.inputs if tensor.weight]
            for layer in spec.kind.layers(geometry) or (None,):
                source = shared if layer is None else layers[layer]
                self._weights[spec.kind.name, layer] = {name: source[name] for name in names}
        world = plans.specs[0].world

        def most(stage: Stage, extent: Extent) -> int:
            return profile_ranges(geometry, stage, limits, world, Phase.PREFILL)[extent].most

        self._most_tokens = most(Stage.EMBED, Extent.OWN_ROWS)
        self._most_heads = most(Stage.HEAD, Extent.ROWS)
        # Made once by value: a copy from the host in the middle of a walk would wait for the device.
        self._scalars: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}
        self._faults: torch.Tensor | None = None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        kind = PlanKind(stage=Stage.EMBED)
        parts = []
        for piece in _pieces(tokens, self._most_tokens):
            rows = self._run(kind, None, tokens=padded(piece, max(1, len(piece))))["streams"]
            parts.append(rows[: len(piece)])
        return joined(parts)

    def project(self, spec: LayerSpec, streams: torch.Tensor, positions: torch.Tensor) -> Projected:
        rows = streams.shape[0]
        least = max(1, rows)
        found = self._run(
            PlanKind(stage=Stage.PROJECT, attention=spec.attention), spec,
            streams=padded(streams, least), frames=padded(positions, least), rope=self._rope(spec),
        )  # fmt: skip
        found = {name: tensor[:rows] for name, tensor in found.items()}
        return Projected(
            query_latent=found["query_latent"],
            latent=_rows(found["latent"]),
            post=found["attn_post"],
            comb=found["attn_comb"],
            raw=tuple(found[f"raw.{index}"] for index in range(sum(name.startswith("raw.") for name in found))),
            index_weights=found.get("index_weights"),
        )

    def compress(
        self,
        spec: LayerSpec,
        raw: Sequence[torch.Tensor],
        table: CompressTable,
        entries: torch.Tensor,
        index_keys: torch.Tensor | None,
    ) -> None:
        if table.entries.shape[0] == 0:
            return
        found = self._run(
            PlanKind(stage=Stage.COMPRESS, attention=spec.attention), spec,
            **{f"raw.{index}": rows for index, rows in enumerate(raw)},
            slots=table.slots, frames=table.positions, rope=self._rope(spec),
        )  # fmt: skip
        self._ops.write_rows(entries, table.entries, _rows(found["entries"]))
        if index_keys is not None:
            self._ops.write_rows(index_keys, table.entries, _rows(found["index_keys"]))

    def select(
        self,
        spec: LayerSpec,
        own: Projected,
        index_keys: torch.Tensor,
        table: AttentionTable,
        counts: Sequence[int],
    ) -> torch.Tensor:
        assert own.index_weights is not None, "entries are selected in CSA layers only"
        most = max(counts)
        selected = self._run(
            PlanKind(stage=Stage.SELECT, attention=spec.attention), spec,
            query_latent=padded(own.query_latent, most), index_weights=padded(own.index_weights, most),
            index_keys=index_keys, **_table(padded_table(table, most)), rope=self._rope(spec),
        )["selected"]  # fmt: skip
        if min(counts) == most:
            return selected
        return torch.cat([block[:count] for block, count in zip(selected.split(most), counts, strict=True)])

    def attend(
        self,
        spec: LayerSpec,
        query_latent: torch.Tensor,
        full_rows: int,
        table: AttentionTable,
        latents: torch.Tensor,
        entries: torch.Tensor | None,
        selected: torch.Tensor | None,
        restored: torch.Tensor,
        *,
        tap: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        rows = query_latent.shape[0]
        before, after = int(full_rows == 0), int(full_rows == rows)

        def around(x: torch.Tensor) -> torch.Tensor:
            return last_row_again(x, before=before, after=after)

        if self._format.packed_local:
            restored = pack_rows(restored)
        pools = {"latents": latents}
        if entries is not None:
            pools["entries"] = entries
        if selected is not None:
            pools["selected"] = around(selected)
        found = self._run(
            PlanKind(stage=Stage.ATTEND, attention=spec.attention), spec,
            query_latent=around(query_latent),
            segments=table.segments, row_segments=around(table.row_segments), positions=around(table.positions),
            visible=around(table.visible), **pools, restored=padded(restored, rows - full_rows + after),
            rope=self._rope(spec),
        )  # fmt: skip
        if tap is not None:
            tap(found["local"][before:])
        return found["partial"][before : before + rows]

    def mix(
        self,
        spec: LayerSpec,
        streams: torch.Tensor,
        own: Projected,
        partial: torch.Tensor,
        tokens: torch.Tensor,
        counts: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, most = streams.shape[0], max(counts)
        device = streams.device
        choice = (
            {"tokens": padded(tokens, most)}
            if spec.router is RouterKind.HASH
            else {"tau": self._scalar(spec.tau, torch.float32, device)}
        )
        found = self._run(
            PlanKind(stage=Stage.MIX, router=spec.router), spec,
            streams=padded(streams, most), attn_post=padded(own.post, most), attn_comb=padded(own.comb, most),
            partial=spread(partial, counts), first_expert=self._scalar(spec.first_expert, torch.int64, device),
            **choice,
        )  # fmt: skip
        if "faults" in found:
            self._faults = found["faults"] if self._faults is None else self._faults | found["faults"]
        return found["mixed"][:rows], found["expert_ids"][:rows]

    def salience(
        self, spec: LayerSpec, own: Projected, rows: torch.Tensor, index_keys: torch.Tensor, table: AttentionTable,
        entries: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """By the ops of torch: the controller asks for few rows, once a request."""
        assert own.index_weights is not None, "salience is asked of CSA layers only"
        query = model.index_query(self._ops, spec, self._layers[spec.layer], own.query_latent[rows])
        sums: tuple[torch.Tensor, torch.Tensor] = self._ops.index_salience(
            query, own.index_weights[rows], self._cache.values(Part.INDEX_KEYS, index_keys), table, self._rope(spec),
            entries=entries,
        )  # fmt: skip
        return sums

    def turn(self, attention: AttentionKind, rows: torch.Tensor, frames: torch.Tensor) -> None:
        self._ops.turn_rows(rows, frames, self._ropes[attention])

    def head(self, streams: torch.Tensor) -> torch.Tensor:
        kind = PlanKind(stage=Stage.HEAD)
        parts = []
        for piece in _pieces(streams, self._most_heads):
            logits = self._run(kind, None, streams=padded(piece, max(1, len(piece))))["logits"]
            parts.append(logits[: len(piece)])
        return joined(parts)

    def check(self) -> None:
        """Raise EngineError where a hash router met a token outside of its table since the last check. Waits for the
        device."""
        faults, self._faults = self._faults, None
        if faults is not None and int(faults) != 0:
            raise EngineError(
                "a hash router met a token or an expert outside of its table", found=f"fault {int(faults)}",
                remedy="The engine's files are not those of its tokenizer; build it again.",
            )  # fmt: skip

    def _run(self, kind: PlanKind, spec: LayerSpec | None, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = self._weights[kind.name, None if spec is None else spec.layer]
        return self._runtime.run(kind.name, {**tensors, **weights})

    def _rope(self, spec: LayerSpec) -> torch.Tensor:
        # Tables grow by doubling, and may be longer than a plan's largest size.
        return self._ropes[spec.attention][: self._limits.max_length]

    def _scalar(self, value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = (value, dtype, device)
        if key not in self._scalars:
            self._scalars[key] = torch.tensor([value], dtype=dtype, device=device)
        return self._scalars[key]


def _pieces(rows: torch.Tensor, most: int) -> Sequence[torch.Tensor]:
    """Rows in pieces that a plan can take; no rows are one empty piece."""
    return rows.split(most) if len(rows) else [rows]


def _rows(rows: torch.Tensor) -> torch.Tensor:
    """Cache rows as the pools hold them. TensorRT calls the bytes of packed ones int8."""
    return rows.view(torch.uint8) if rows.dtype is torch.int8 else rows


def _table(table: AttentionTable) -> dict[str, torch.Tensor]:
    return {
        "segments": table.segments, "row_segments": table.row_segments, "positions": table.positions,
        "visible": table.visible,
    }  # fmt: skip
