"""Ranks without a checkpoint: random weights, artifacts of random values in memory, and collectives for a lone rank.

For benches only. A stand-in collective moves as many bytes as the real one would write on this rank, by device copies;
what it returns is not what the other ranks would have sent, so answers mean nothing and times do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from trt_redknot.artifacts.contents import Part
from trt_redknot.artifacts.copies import HostCopies
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.checkpoint.specs import Storage, TensorSpec, layer_specs, shared_specs
from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.chunking import choose_chunk_rows, free_memory
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.executor import OpsExecutor, TorchOps
from trt_redknot.engine.manifest import ExpertStorage
from trt_redknot.engine.ropes import RopeTables
from trt_redknot.engine.tiles import TileOptions, Tiles
from trt_redknot.engine.walk import LayerWalk
from trt_redknot.engine.weights import quantised, with_experts
from trt_redknot.evaluation.metering import Clock, MeteredOps
from trt_redknot.model.layers import PROJECTIONS, Weights
from trt_redknot.model.weights import split_heads
from trt_redknot.observability.events import Tier
from trt_redknot.ops.cuda.backend import CudaOps
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.partition import even_split

_KEY_SIZE = 3.0
# Rows of a chunk where memory is short.
_LEAST_CHUNK = 1024


class StandInCollectives:
    """Rank `rank` of `size`, without the others."""

    capturable = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        rows, total = own.shape[0], sum(counts)
        if rows == 0:
            return own.new_zeros((total, *own.shape[1:]))
        copies, rest = divmod(total, rows)
        # One launch that writes what the ranks would have sent, whether they have equally many rows or not.
        return torch.cat([own] * copies + ([own[:rest]] if rest else []))

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


class StandInArtifact:
    """A document of random values, as stored, in memory; all layers share the same tensors.

    Args:
        local_width: channels of the rank's Local contributions.
        place: where the stored tensors lie. Host memory is pinned where there is a GPU.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        tokens: int,
        local_width: int,
        *,
        form: ArtifactFormat,
        place: torch.device,
        content_digest: str = "stand-in",
    ) -> None:
        self.content_digest = content_digest
        self._geometry = geometry
        self._tokens = tokens
        self._form = form
        self._widths = {Part.INDEX_KEYS: geometry.index_dim, Part.LOCAL: local_width}
        g = geometry
        entries = -(-tokens // g.csa_ratio)
        shapes = {
            Part.LATENTS: (tokens, g.head_dim),
            Part.ENTRIES: (entries, g.head_dim),
            Part.INDEX_KEYS: (entries, g.index_dim),
            Part.BOUNDARY: (min(tokens, g.csa_ratio), 4 * g.head_dim + 4 * g.index_dim),
            Part.LOCAL: (tokens, local_width),
            Part.STREAMS: (tokens, g.streams, g.hidden),
            Part.SALIENCE: (entries,),
        }
        self._stored = {part: self._random(part, shape, place) for part, shape in shapes.items()}

    def _random(self, part: Part, shape: tuple[int, ...], place: torch.device) -> torch.Tensor:
        # Random numbers and packing are a GPU's work wherever the result lies.
        maker = place if place.type != "cpu" or not torch.cuda.is_available() else torch.device("cuda")
        values = self.codec(part).encode(torch.randn(shape, dtype=self._form.dtype, device=maker))
        if place.type != "cpu" or maker.type == "cpu":
            return values
        return HostCopies().begin(values).wait()

    def codec(self, part: Part) -> TensorCodec:
        g = self._geometry
        return TensorCodec(part=part, format=self._form, width=self._widths.get(part, g.head_dim), rope_dim=g.rope_dim)

    def count(self, tier: Tier, bytes: int) -> None:
        return None

    def raw(self, part: Part, layer: int | None) -> torch.Tensor:
        stored = self._stored[part]
        if part is Part.ENTRIES and layer is not None:
            return stored[: -(-self._tokens // self._geometry.ratio(layer))]
        return stored

    def tensor(self, part: Part, layer: int | None, dtype: torch.dtype) -> torch.Tensor:
        return self.codec(part).decode(self.raw(part, layer), dtype)

    def rows(self, part: Part, layer: int | None, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = self.raw(part, layer)
        return self.codec(part).decode(stored.index_select(0, index.to(stored.device)), dtype)


def random_tensor(
    spec: TensorSpec, rank: int, size: int, experts: int, dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    """A weight of the rank's shape; matrices keep the scale of what goes through them.

    What all ranks hold is the same on all of them; slices differ.
    """
    generator = torch.Generator(device).manual_seed(seed if spec.axis is None else seed * size + rank + 1)
    shape = spec.local_shape(rank, size)
    if spec.storage is Storage.TABLE:
        return torch.randint(0, experts, shape, dtype=torch.int32, device=device, generator=generator)
    if spec.name.endswith("router.bias"):
        # Experts get as many rows as random scores give them.
        return torch.zeros(shape, device=device)
    if spec.storage is Storage.EXACT and spec.name.endswith(("norm", "scale")):
        # Large keys make attention choose, as a trained network's does: positions then matter.
        norm = _KEY_SIZE if spec.name.endswith("kv_norm") else 1.0
        return torch.empty(shape, device=device).uniform_(0.5 * norm, 1.5 * norm, generator=generator)
    if spec.storage is Storage.EXACT and not spec.name.endswith(".fn"):
        # Sinks, biases: none of them may be left out, or come twice, unseen.
        return torch.randn(shape, device=device, generator=generator).mul_(0.5)
    stored = torch.float32 if spec.storage is Storage.EXACT else dtype
    return torch.randn(shape, dtype=stored, device=device, generator=generator).mul_(shape[-1] ** -0.5)


@dataclass(frozen=True, kw_only=True)
class StandInRank:
    """A rank with random weights.

    Attributes:
        layers, shared: its tensors, by the names of the layer functions.
    """

    context: RankContext
    layers: list[Weights]
    shared: Weights
    ropes: RopeTables

    def metered(self, clock: Clock) -> tuple[RankContext, MeteredOps]:
        """The same rank, with every op measured."""
        context = self.context
        meter = MeteredOps(ops=context.ops, geometry=context.geometry, clock=clock)
        return self._over(cast("TorchOps", meter), self.ropes), meter

    def moved(self, start: int) -> RankContext:
        """The same rank, for which position 0 is position `start`. A request of one segment is answered by the same
        function, rounded in another frame; frames of several segments are composed from position 0. The tables must
        reach `start` positions further than what is asked."""
        return self._over(
            cast("TorchOps", self.context.ops), {kind: table[start:] for kind, table in self.ropes.items()}
        )

    def _over(self, ops: TorchOps, ropes: Mapping[AttentionKind, torch.Tensor]) -> RankContext:
        context = self.context
        stages, walk = _executor(context.geometry, context.collectives, ops, self.layers, self.shared, ropes)
        return dataclasses.replace(context, ops=ops, stages=stages, walk=walk)


def make_rank(
    geometry: ModelGeometry,
    collectives: Collectives,
    *,
    chunk_rows: int | None,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    tiles: TileOptions,
    experts: ExpertStorage = "same",
    seed: int = 0,
) -> StandInRank:
    """A rank of a network with random weights, without a checkpoint or an engine directory.

    Args:
        chunk_rows: rows that go through a stage together; None: what a GPU's memory has room for.
        experts: how expert weights are held.
        collectives: real ones, or :class:`StandInCollectives`.
        length: most positions that are asked for.
    """
    profile, rank, size = SplitProfile.default(geometry), collectives.rank, collectives.size
    layers: list[Weights] = []
    first_group = geometry.output_groups // size * rank
    seeds = itertools.count(seed << 32)
    for layer in range(geometry.layers):
        tensors = {
            spec.name: random_tensor(spec, rank, size, geometry.experts, dtype, device, next(seeds))
            for spec in layer_specs(geometry, layer)
        }
        split = split_heads(tensors, geometry, profile, layer, first_group)
        layers.append(with_experts(quantised(split) if experts == "fp8" else split))
    shared = {
        spec.name: random_tensor(spec, rank, size, geometry.experts, dtype, device, next(seeds))
        for spec in shared_specs(geometry)
    }
    ropes = RopeTables(geometry, dtype, device)
    ropes.grow(length)
    ops = CudaOps(collectives, geometry) if device.type == "cuda" else ReferenceOps(collectives)
    layers = [ops.prepared(layer, together=PROJECTIONS[AttentionKind.CSA]) for layer in layers]
    if chunk_rows is None:
        chosen = choose_chunk_rows(
            geometry, profile, tp_size=size, length=length, free_bytes=free_memory(device), least=_LEAST_CHUNK,
            dtype=dtype,
        )  # fmt: skip
        chunk_rows = min(int(reply) for reply in collectives.exchange(str(chosen).encode()))
    stages, walk = _executor(geometry, collectives, ops, layers, shared, ropes)
    context = RankContext(
        geometry=geometry,
        profile=profile,
        stages=stages,
        walk=walk,
        ops=ops,
        collectives=collectives,
        local_width=geometry.projected // size,
        chunk_rows=chunk_rows,
        dtype=dtype,
        device=device,
        tiles=Tiles(dtype, device, tiles),
    )
    return StandInRank(context=context, layers=layers, shared=shared, ropes=ropes)


def _executor(
    geometry: ModelGeometry, collectives: Collectives, ops: TorchOps, layers: list[Weights], shared: Weights,
    ropes: Mapping[AttentionKind, torch.Tensor],
) -> tuple[OpsExecutor, LayerWalk]:  # fmt: skip
    stages = OpsExecutor(geometry, layers, shared, ropes, ops)
    experts = even_split(geometry.experts, collectives.size)[collectives.rank]
    return stages, LayerWalk(geometry, stages, ops, first_expert=experts.start)
