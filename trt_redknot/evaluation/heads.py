"""Which heads need the context: the drift of each head's output between a document alone and in a prompt.

A Local head's contribution is taken from the artifact, where the document was alone; the Global head of a group is
always computed. So the head whose contribution changes most makes the best Global head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.engine import Engine
from trt_redknot.errors import RequestError
from trt_redknot.ops.reference.backend import ReferenceOps
from trt_redknot.request.request import Request, Tokens

# Rows whose projected contributions are held at a time.
_BLOCK = 256


class HeadTap:
    """Ops that keep what the heads of one request hand to the output projection; everything passes through.

    Give it to `Engine.open(watch=tap.watch)`.
    """

    def __init__(self) -> None:
        self._ops: ReferenceOps | None = None
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(self, ops: ReferenceOps) -> ReferenceOps:
        self._ops = ops
        return cast("ReferenceOps", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def grouped_linear(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Called twice for every layer and chunk: first with the Local heads, then with the Global ones."""
        self._calls.append((heads, weight))
        assert self._ops is not None
        return self._ops.grouped_linear(heads, weight)

    def take(self, rows: int, groups: int) -> list[LayerHeads]:
        """What the heads of every layer gave since the last call, for a request of `rows` rows that ran alone."""
        layers: list[LayerHeads] = []
        local: list[torch.Tensor] = []
        every: list[torch.Tensor] = []
        for (own, own_weight), (other, other_weight) in zip(self._calls[::2], self._calls[1::2], strict=True):
            local.append(own.unflatten(1, (groups, -1)))
            every.append(other.unflatten(1, (groups, -1)))
            if sum(len(part) for part in local) == rows:
                width = own.shape[-1]
                layers.append(
                    LayerHeads(
                        local=torch.cat(local),
                        local_weight=own_weight.unflatten(2, (-1, width)),
                        chosen=torch.cat(every),
                        chosen_weight=other_weight.unflatten(2, (-1, width)),
                    )
                )
                local, every = [], []
        self._calls.clear()
        return layers


@dataclass(frozen=True, kw_only=True)
class LayerHeads:
    """Outputs of a layer's heads and their columns of W_a, Local heads and Global ones: [R, G, h, D], [G, C, h, D]."""

    local: torch.Tensor
    local_weight: torch.Tensor
    chosen: torch.Tensor
    chosen_weight: torch.Tensor

    def rows(self, first: int, last: int) -> LayerHeads:
        return LayerHeads(
            local=self.local[first:last], local_weight=self.local_weight, chosen=self.chosen[first:last],
            chosen_weight=self.chosen_weight,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Sums over rows of squared contributions, by layer, group and head: [L, G, h], fp64.

    Attributes:
        change: of the contribution's change between alone and in context.
        size: of the contribution in context.
        rows: rows that were summed.
    """

    change: torch.Tensor
    size: torch.Tensor
    rows: int

    def __add__(self, other: Drift) -> Drift:
        return Drift(change=self.change + other.change, size=self.size + other.size, rows=self.rows + other.rows)


def measure_drift(engine: Engine, tap: HeadTap, documents: Sequence[Sequence[int]]) -> Drift:
    """Drift of every head over all documents but the first, which has no context. Collective.

    Raises:
        RequestError: fewer than two documents.
    """
    if len(documents) < 2:
        raise RequestError("heads are compared in context", expected="at least two documents", found=len(documents))
    together = heads_of(engine, tap, [token for document in documents for token in document])
    start, drift = len(documents[0]), None
    for document in documents[1:]:
        alone = heads_of(engine, tap, list(document))
        layers = [
            _layer_drift(engine, layer, apart, joined.rows(start, start + len(document)))
            for layer, (apart, joined) in enumerate(zip(alone, together, strict=True))
        ]
        own = Drift(
            change=torch.stack([change for change, _ in layers]), size=torch.stack([size for _, size in layers]),
            rows=len(document),
        )  # fmt: skip
        drift = own if drift is None else drift + own
        start += len(document)
    assert drift is not None
    return _over_ranks(engine, drift)


def drift_profile(engine: Engine, drift: Drift, name: str) -> SplitProfile:
    """The engine's profile with the head of largest change as the Global head of every group of reusable layers."""
    profile = engine.manifest.profile
    best = drift.change.argmax(-1)
    heads = {layer: tuple(int(head) for head in best[layer]) for layer in profile.reusable}
    return SplitProfile.model_validate(profile.model_dump() | {"name": name, "global_heads": heads})


def heads_of(engine: Engine, tap: HeadTap, tokens: list[int]) -> list[LayerHeads]:
    """What the heads of every layer give for these tokens alone, this rank's groups of them. Collective."""
    engine.generate(Request(segments=[Tokens(tokens)], max_new_tokens=1, reuse=None))
    return tap.take(len(tokens), engine.geometry.output_groups // engine.collectives.size)


def _layer_drift(
    engine: Engine, layer: int, alone: LayerHeads, joined: LayerHeads
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change and size of this rank's heads of a layer, [G of the rank, h], heads in the checkpoint's order."""
    profile, groups = engine.manifest.profile, alone.local.shape[1]
    heads = engine.geometry.heads_per_group
    change = torch.zeros(groups, heads, dtype=torch.float64)
    size = torch.zeros(groups, heads, dtype=torch.float64)
    first = groups * engine.collectives.rank
    for group in range(groups):
        chosen = profile.global_head(layer, first + group)
        others = [head for head in range(heads) if head != chosen]
        for apart, near, weight, places in (
            (alone.local, joined.local, joined.local_weight, others),
            (alone.chosen, joined.chosen, joined.chosen_weight, [chosen]),
        ):
            columns = weight[group].double()
            for start in range(0, len(near), _BLOCK):
                rows = slice(start, start + _BLOCK)
                inside = near[rows, group].double()
                moved = inside - apart[rows, group].double()
                change[group, places] += torch.einsum("rhd,chd->rhc", moved, columns).square().sum((0, 2)).cpu()
                size[group, places] += torch.einsum("rhd,chd->rhc", inside, columns).square().sum((0, 2)).cpu()
    return change, size


def _over_ranks(engine: Engine, drift: Drift) -> Drift:
    """The groups of all ranks, in their order."""
    own = json.dumps([drift.change.tolist(), drift.size.tolist()]).encode()
    parts = [json.loads(reply) for reply in engine.collectives.exchange(own)]
    change, size = (
        torch.cat([torch.tensor(part[index], dtype=torch.float64) for part in parts], dim=1) for index in (0, 1)
    )
    return Drift(change=change, size=size, rows=drift.rows)
