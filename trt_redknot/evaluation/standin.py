"""One rank of a tensor-parallel group alone on a GPU: random weights, stand-in collectives, artifacts in device memory.

For benches only. A stand-in collective moves as many bytes as the real one would write on this rank, by device copies;
what it returns is not what the other ranks would have sent, so answers mean nothing and times do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.checkpoint.specs import Storage, TensorSpec, layer_specs, shared_specs
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.ropes import RopeTables
from trt_redknot.engine.walk import LayerWalk
from trt_redknot.model.layers import Weights
from trt_redknot.model.weights import split_heads
from trt_redknot.ops.cuda.backend import CudaOps


class StandInCollectives:
    """Rank `rank` of `size`, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if set(counts) == {own.shape[0]}:
            return own.repeat(self.size, *([1] * (own.dim() - 1)))
        gathered = own.new_empty((sum(counts), *own.shape[1:]))
        start = 0
        for count in counts:
            take = min(count, own.shape[0])
            gathered[start : start + take] = own[:take]
            gathered[start + take : start + count] = 0
            start += count
        return gathered

    def reduce_scatter(self, partial: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        start = sum(counts[: self.rank])
        return partial[start : start + counts[self.rank]].clone()

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial.clone()

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        received = rows.new_zeros((sum(receive_counts), *rows.shape[1:]))
        take = min(len(received), len(rows))
        received[:take] = rows[:take]
        return received

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size

    def barrier(self) -> None:
        return None


class DeviceArtifact:
    """A document whose parts lie in device memory; all layers share the same random tensors."""

    def __init__(
        self, geometry: ModelGeometry, tokens: int, local_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        g = geometry
        entries = -(-tokens // g.csa_ratio)
        self._parts = {
            Part.LATENTS: normal(tokens, g.head_dim),
            Part.ENTRIES: normal(entries, g.head_dim),
            Part.INDEX_KEYS: normal(entries, g.index_dim),
            Part.BOUNDARY: normal(min(tokens, g.csa_ratio), 4 * g.head_dim + 4 * g.index_dim),
            Part.LOCAL: normal(tokens, local_width),
            Part.STREAMS: normal(tokens, g.streams, g.hidden),
            Part.SALIENCE: torch.rand(entries, dtype=torch.float64, device=device),
        }
        self._geometry = geometry
        self._tokens = tokens

    def tensor(self, part: Part, layer: int | None, *, dtype: torch.dtype) -> torch.Tensor:
        values = self._parts[part]
        if part is Part.ENTRIES and layer is not None:
            values = values[: -(-self._tokens // self._geometry.ratio(layer))]
        return values.to(dtype)

    def rows(self, part: Part, layer: int | None, index: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        values = self._parts[part]
        return values.index_select(0, index.to(values.device)).to(dtype)


def random_tensor(spec: TensorSpec, rank: int, size: int, experts: int, device: torch.device) -> torch.Tensor:
    """A weight of the rank's shape; matrices keep the scale of what goes through them."""
    shape = spec.local_shape(rank, size)
    if spec.storage is Storage.TABLE:
        return torch.randint(0, experts, shape, dtype=torch.int32, device=device)
    if spec.storage is Storage.EXACT and not spec.name.endswith(".fn"):
        return torch.full(shape, float(spec.name.endswith("norm")), device=device)
    dtype = torch.float32 if spec.storage is Storage.EXACT else torch.bfloat16
    return torch.randn(shape, dtype=dtype, device=device).mul_(shape[-1] ** -0.5)


def rank_context(
    geometry: ModelGeometry, rank: int, size: int, *, chunk_rows: int, length: int, device: torch.device
) -> tuple[RankContext, Weights]:
    """A rank with random weights, and its tensors outside the layers."""
    profile = SplitProfile.default(geometry)
    collectives = StandInCollectives(rank, size)
    ops = CudaOps(collectives, geometry)
    layers: list[Weights] = []
    first_group = geometry.output_groups // size * rank
    for layer in range(geometry.layers):
        tensors = {
            spec.name: random_tensor(spec, rank, size, geometry.experts, device)
            for spec in layer_specs(geometry, layer)
        }
        layers.append(split_heads(tensors, geometry, profile, layer, first_group))
    shared = {spec.name: random_tensor(spec, rank, size, geometry.experts, device) for spec in shared_specs(geometry)}
    ropes = RopeTables(geometry, torch.bfloat16, device)
    ropes.grow(length)
    first_expert = geometry.experts // size * rank
    context = RankContext(
        geometry=geometry,
        profile=profile,
        embedding=shared["embed"],
        walk=LayerWalk(geometry, layers, ropes, ops, first_expert=first_expert),
        ops=ops,
        collectives=collectives,
        local_width=geometry.projected // size,
        chunk_rows=chunk_rows,
        dtype=torch.bfloat16,
        device=device,
    )
    return context, shared
