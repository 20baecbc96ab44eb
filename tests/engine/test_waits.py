"""Between a prefill's entry and its first token the host asks the device once: for the scores that choose the rows.

The stages are stubs, so that what is seen is the engine's own; `test_gpu.py` holds the kernels to the same on a GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.geometry import AttentionKind
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.engine import prefill
from trt_redknot.engine.context import RankContext
from trt_redknot.engine.pool import CachePool, raw_widths
from trt_redknot.engine.tiles import TileOptions, Tiles
from trt_redknot.engine.walk import LayerWalk
from trt_redknot.evaluation.standin import StandInArtifact, StandInCollectives
from trt_redknot.evaluation.ttft import document_length, first_token, segment_table
from trt_redknot.model.layers import Projected
from trt_redknot.model.spec import LayerSpec
from trt_redknot.request.segments import RowClass

CPU = torch.device("cpu")
LENGTH, DOCUMENTS, LAYERS, RANKS = 4096, 4, 9, 8
_FLASH = released_geometry("flash")
GEOMETRY = dataclasses.replace(
    _FLASH, attention_kinds=_FLASH.attention_kinds[:LAYERS], router_kinds=_FLASH.router_kinds[:LAYERS], head_dim=8,
    rope_dim=4, hidden=8, index_dim=8, q_lora_rank=8, vocab=64,
)  # fmt: skip
# What needs a number of the device before the host goes on, whatever the device.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero", "unique_dim", "_unique2"}


class Stubs:
    """Stages that give tensors of the right shapes."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens), GEOMETRY.streams, GEOMETRY.hidden)

    def project(self, spec: LayerSpec, streams: torch.Tensor, frames: torch.Tensor) -> Projected:
        rows = len(streams)
        assert len(frames) == rows
        weights = torch.zeros(rows, 1) if spec.attention is AttentionKind.CSA else None
        raw = tuple(torch.zeros(rows, width) for width in raw_widths(GEOMETRY, spec.layer))
        return Projected(
            query_latent=torch.zeros(rows, GEOMETRY.q_lora_rank), latent=torch.zeros(rows, GEOMETRY.head_dim),
            post=None, comb=None, raw=raw, index_weights=weights,
        )  # fmt: skip

    def compress(self, *_: Any) -> None:
        return None

    def turn(self, kind: AttentionKind, rows: torch.Tensor, frames: torch.Tensor) -> None:
        assert frames.shape == rows.shape[:1]

    def select(self, spec: LayerSpec, own: Projected, keys: torch.Tensor, table: Any, counts: Sequence[int]) -> Any:
        return torch.zeros(sum(counts), 1, dtype=torch.int64)

    def attend(self, spec: LayerSpec, query_latent: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(query_latent), GEOMETRY.hidden)

    def mix(self, spec: LayerSpec, streams: torch.Tensor, own: Any, partial: Any, tokens: Any, counts: Any) -> Any:
        return streams, torch.zeros(len(streams), GEOMETRY.experts_per_token, dtype=torch.int64)

    def salience(
        self, spec: LayerSpec, own: Projected, rows: torch.Tensor, keys: Any, table: Any, entries: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(table.positions) == len(rows) <= len(own.query_latent)
        return torch.arange(entries, dtype=torch.float32), torch.ones(entries)

    def head(self, streams: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(streams), GEOMETRY.vocab // RANKS)

    def check(self) -> None:
        return None


class StubOps:
    def __init__(self) -> None:
        collectives = StandInCollectives(0, RANKS)
        self.all_gather = collectives.all_gather
        self.reduce_scatter = collectives.reduce_scatter

    def write_rows(self, pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        assert len(rows) == len(values)


class Seen(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.ops[name] += 1
        indices = args[1] if name in ("index", "index_put_", "index_put") else ()
        masked = any(index is not None and index.dtype is torch.bool for index in indices)
        if name in WAITS or masked:
            self.waits[f"{name} by a mask" if masked else name] += 1
        return func(*args, **(kwargs or {}))


def context_of(chunk_rows: int) -> RankContext:
    stages: Any = Stubs()
    ops: Any = StubOps()
    return RankContext(
        geometry=GEOMETRY, profile=SplitProfile.default(GEOMETRY), stages=stages,
        walk=LayerWalk(GEOMETRY, stages, ops, first_expert=0), ops=ops, collectives=StandInCollectives(0, RANKS),
        local_width=8, chunk_rows=chunk_rows, dtype=torch.float32, device=CPU,
        tiles=Tiles(torch.float32, CPU, TileOptions(depth=0)),
    )  # fmt: skip


def seen_in(
    policy: ReusePolicy | None, monkeypatch: pytest.MonkeyPatch, *, chunk_rows: int = LENGTH, documents: int = DOCUMENTS
) -> tuple[Seen, int]:
    """What a prefill up to its first token dispatched, and how often it fetched."""
    size = document_length(LENGTH, documents)
    artifacts = {
        index: StandInArtifact(
            GEOMETRY, size, 8, form=ArtifactFormat.FLOAT32, place=CPU, content_digest=str(index)
        )
        for index in range(documents)
    }  # fmt: skip
    fetched = []

    class Noted(prefill.Arriving):
        def wait(self) -> np.ndarray:
            fetched.append(True)
            return super().wait()

    monkeypatch.setattr(prefill, "Arriving", Noted)
    seen = Seen()
    run = prefill.Prefill.run

    def whole(self: prefill.Prefill) -> Any:
        steps = run(self)
        while True:
            with seen:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
            yield

    monkeypatch.setattr(prefill.Prefill, "run", whole)
    with torch.inference_mode():
        found = first_token(
            context_of(chunk_rows), segment_table(LENGTH, documents, reuse=policy is not None), artifacts, policy
        )
    assert (found.plan.count(RowClass.OMITTED) > 0) == (policy is not None)
    monkeypatch.undo()
    return seen, len(fetched)


REUSE = ReusePolicy(boundary=8, tail=64, top_entries=16, budget=0.25)


@pytest.mark.parametrize("epilogue", ["full", "active", None])
@pytest.mark.parametrize("chunk_rows", [500, LENGTH])
def test_a_prefill_waits_for_nothing_but_the_scores(
    epilogue: Any, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = None if epilogue is None else REUSE.model_copy(update={"epilogue": epilogue})
    seen, fetched = seen_in(policy, monkeypatch, chunk_rows=chunk_rows)
    assert not seen.waits
    assert fetched == (policy is not None)
    assert sum(seen.ops.values()) > LAYERS


def test_a_pool_is_gone_with_its_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, which may come late: pools are most of the memory that requests take."""
    made: list[weakref.ref[CachePool]] = []
    plain = CachePool.__init__

    def noted(self: CachePool, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        made.append(weakref.ref(self))

    monkeypatch.setattr(CachePool, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        seen_in(REUSE, monkeypatch)
        assert len(made) == 1
        assert made[0]() is None
    finally:
        gc.enable()


def test_what_would_wait_is_seen() -> None:
    """The test above can fail."""
    values = torch.arange(4)
    with Seen() as seen:
        int(values.sum())
        values[values > 1]
        values.nonzero()
        values[values > 2] = 0
    assert set(seen.waits) == {"_local_scalar_dense", "index by a mask", "nonzero", "index_put_ by a mask"}


def test_a_layer_costs_the_host_the_same_in_any_number_of_chunks_but_for_their_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables are cut once a row set, and artifacts are read once a layer: a chunk more adds what its rows need."""
    counts = []
    for chunks in (1, 2, 4):
        seen, _ = seen_in(REUSE, monkeypatch, chunk_rows=LENGTH // chunks)
        counts.append(sum(seen.ops.values()) / LAYERS)
    whole, halves, quarters = counts
    # Stubs make 9 tensors a chunk of a layer; most row sets here are one chunk however small chunks are.
    assert halves - whole < 40
    assert quarters - halves < 80
