"""The torch backend on a GPU: our kernels where they serve the geometry and dtype, the references for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.errors import EngineError
from trt_redknot.ops.cuda import attention, elementwise, indexer, moe, rows
from trt_redknot.ops.reference import projection
from trt_redknot.ops.reference.backend import ReferenceOps

# Up to so many rows take products of several weights at once.
FEW_ROWS = 16


class CudaOps(ReferenceOps):
    """Implements :class:`trt_redknot.ops.interface.Ops` over bf16 CUDA tensors.

    Args:
        geometry: decides once which kernels can serve; the answer does not change from call to call.

    Raises:
        EngineError: the kernel library was not built (at the first op).
    """

    rms_norm = staticmethod(elementwise.rms_norm)
    query_norm = staticmethod(elementwise.query_norm)
    norm_rope_pack = staticmethod(elementwise.norm_rope_pack)
    compress = staticmethod(elementwise.compress)
    restore_replace = staticmethod(elementwise.restore_replace)
    hyper_connection_pre = staticmethod(elementwise.hyper_connection_pre)
    hyper_connection_post = staticmethod(elementwise.hyper_connection_post)
    hyper_head = staticmethod(elementwise.hyper_head)
    route_learned = staticmethod(moe.route_learned)
    write_rows = staticmethod(rows.write_rows)
    experts = staticmethod(moe.experts)

    def __init__(self, collectives: Collectives, geometry: ModelGeometry) -> None:
        super().__init__(collectives)
        g = geometry
        attends = attention.attention_supported(g.head_dim, g.rope_dim, g.index_topk, torch.bfloat16)
        indexes = indexer.indexer_supported(g.index_heads, g.index_dim, g.rope_dim, g.index_topk, torch.bfloat16)
        if g.rope_dim == rows.ROPE_DIM:
            self.turn_rows = rows.turn_rows
        if attends:
            self.seg_latent_attention = attention.seg_latent_attention
        if indexes:
            self.lightning_indexer = indexer.lightning_indexer
            self.index_salience = indexer.index_salience
        # The references of these two look at the tables on the host.
        self.capturable = attends and indexes
        self._cells: dict[torch.device, _Cells] = {}
        # By address of the gate's weight, both weights in one tensor.
        self._gate_up: dict[int, torch.Tensor] = {}
        # By address of the first, weights that the same rows go through in one tensor.
        self._joined: dict[int, torch.Tensor] = {}

    def prepared(self, weights: Mapping[str, Any], *, together: Sequence[str] = ()) -> Mapping[str, Any]:
        """A layer's tensors as the kernels read them: hash tables in int64, weights of the same rows side by side, and
        so gate and up of the shared expert. The tensors that were given are not changed, and needed no longer."""
        result = dict(weights)
        names = [name for name in together if name in result]
        parts = [result[name] for name in names]
        if len(parts) > 1 and parts[0].data_ptr() not in self._joined and len({part.dtype for part in parts}) == 1:
            joined = torch.cat(parts)
            self._joined[joined.data_ptr()] = joined
            result.update(zip(names, joined.split([part.shape[0] for part in parts]), strict=True))
        if "router.tid2eid" in result:
            result["router.tid2eid"] = result["router.tid2eid"].long()
        gate, up = result.get("shared.gate"), result.get("shared.up")
        if gate is not None and up is not None and gate.data_ptr() not in self._gate_up:
            both = torch.cat((gate, up))
            self._gate_up[both.data_ptr()] = both
            result["shared.gate"], result["shared.up"] = both.split((gate.shape[0], up.shape[0]))
        return result

    def linears(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As the reference; few rows, which are bound by launches, go through all weights at once."""
        widths = [weight.shape[0] for weight in weights]
        joined = self._joined.get(weights[0].data_ptr()) if x.shape[0] <= FEW_ROWS else None
        if joined is None or joined.shape[0] != sum(widths):
            return projection.linears(x, weights)
        return tuple(part.contiguous() for part in F.linear(x, joined).split(widths, dim=1))

    def route_hash(
        self, x_RM: torch.Tensor, weight_XM: torch.Tensor, table_Vk: torch.Tensor, tokens_R: torch.Tensor, *,
        scale: float, scoring: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """As the reference, but a token or expert out of range is noted on the device, for `check`."""
        faults = self._cells_on(x_RM.device).faults
        return moe.route_hash(x_RM, weight_XM, table_Vk, tokens_R, scale=scale, scoring=scoring, faults=faults)

    def shared_expert(
        self, x_RM: torch.Tensor, gate_FM: torch.Tensor, up_FM: torch.Tensor, down_MF: torch.Tensor, *, limit: float
    ) -> torch.Tensor:
        both = self._gate_up.get(gate_FM.data_ptr())
        if both is None:
            both = torch.cat((gate_FM, up_FM))
        return moe.shared_expert(x_RM, both, down_MF, self._cells_on(x_RM.device).every_row, limit=limit)

    def check(self) -> None:
        """Raise EngineError where a hash router met a token or an expert out of range since the last check. Waits for
        the device."""
        for cells in self._cells.values():
            noted = int(cells.faults)
            cells.faults.zero_()
            if noted:
                raise EngineError(
                    "a hash router met numbers that its layer does not have",
                    expected="tokens of the table, and experts of the layer in it",
                    found="a token outside the table" if noted & moe.FAULT_TOKEN else "an expert outside the layer",
                    remedy="The engine's files are damaged: open it with verify=True, or build it again.",
                )

    def _cells_on(self, device: torch.device) -> _Cells:
        cells = self._cells.get(device)
        if cells is None:
            cells = self._cells[device] = _Cells(
                faults=torch.zeros(1, dtype=torch.int32, device=device),
                every_row=torch.full((1,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device),
            )
        return cells


@dataclass(frozen=True, kw_only=True)
class _Cells:
    """Single numbers on a device: int32 [1].

    Attributes:
        faults: what routers noted since the last check.
        every_row: an end that no row is behind.
    """

    faults: torch.Tensor
    every_row: torch.Tensor
