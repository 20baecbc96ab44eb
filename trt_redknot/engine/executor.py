"""Who computes the stages of a layer: the ops of a torch backend, or (engine/tensorrt) plans.

The walk, the prefill and decoding know nothing else of a backend. Rows that no rank has are no rows: sizes may be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.model import layers as model
from trt_redknot.model.layers import Projected, Weights
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops
from trt_redknot.ops.tables import AttentionTable, CompressTable


class StageExecutor(Protocol):
    """The stages of :mod:`trt_redknot.model.layers` on one rank. It holds the rank's weights and rope tables.

    `select` and `mix` are collective: all ranks call them with the same `counts`.
    """

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [R] -> streams [R, S, M]."""
        ...

    def project(self, spec: LayerSpec, streams: torch.Tensor, positions: torch.Tensor) -> Projected:
        """Own rows of a chunk: streams [R, S, M], positions in the request int64 [R]."""
        ...

    def compress(
        self,
        spec: LayerSpec,
        raw: Sequence[torch.Tensor],
        table: CompressTable,
        entries: torch.Tensor,
        index_keys: torch.Tensor | None,
    ) -> None:
        """Raw rows of the whole step into the pools of entries and Indexer keys, in place."""
        ...

    def select(
        self,
        spec: LayerSpec,
        own: Projected,
        index_keys: torch.Tensor,
        table: AttentionTable,
        counts: Sequence[int],
    ) -> torch.Tensor:
        """Entries that each row of a chunk attends to: int64 [rows of the chunk, top_k]. `table` is of own rows."""
        ...

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
        """This rank's share of a chunk's attention output: [R, M]. `tap` is shown the online Local contribution."""
        ...

    def mix(
        self,
        spec: LayerSpec,
        streams: torch.Tensor,
        own: Projected,
        partial: torch.Tensor,
        tokens: torch.Tensor,
        counts: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Own rows from the partial sums of attention [rows of the chunk, M] to (streams, expert ids [R, k])."""
        ...

    def salience(
        self, spec: LayerSpec, own: Projected, rows: torch.Tensor, index_keys: torch.Tensor, table: AttentionTable,
        entries: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """For some own rows: sums of their scores by entry, and how many of them see it. `table` is of these rows."""
        ...

    def turn(self, attention: AttentionKind, rows: torch.Tensor, frames: torch.Tensor) -> None:
        """Rows of documents, numbers [R, D], from frames that begin at the request positions `frames` int64 [R] to the
        request's, in place."""
        ...

    def head(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams [R, S, M] -> logits over this rank's share of the vocabulary."""
        ...

    def check(self) -> None:
        """Raise EngineError for a fault that a stage could only note on the device. May wait for it."""
        ...


class TorchOps(Ops, Protocol):
    """Ops that run when they are called.

    Attributes:
        capturable: a CUDA graph can hold every one of them: none waits for the device.
    """

    capturable: bool

    def prepared(self, weights: Weights, *, together: Sequence[str] = ()) -> Weights:
        """A layer's tensors as these ops read them fastest, made once; the same numbers under the same names.

        Args:
            together: names of weights that the same rows go through (`linears`), in that order; not every layer has
                all of them.
        """
        ...

    def over(self, collectives: Collectives) -> Self:
        """The same ops between other ranks, over what these prepared."""
        ...

    def check(self) -> None:
        """Raise EngineError for a fault that an op could only note on the device. May wait for it."""
        ...


class OpsExecutor:
    """Implements :class:`StageExecutor` over the ops of a torch backend.

    Args:
        layers: by layer, this rank's tensors by the names of the layer functions.
        shared: its tensors outside the layers.
        ropes: by attention kind, cos and sin of every position: [positions, P / 2, 2].
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        layers: Sequence[Weights],
        shared: Weights,
        ropes: Mapping[AttentionKind, torch.Tensor],
        ops: TorchOps,
    ) -> None:
        self._geometry = geometry
        self._layers = [ops.prepared(layer, together=model.PROJECTIONS[AttentionKind.CSA]) for layer in layers]
        self._shared = shared
        self._ropes = ropes
        self._ops = ops

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold the stages."""
        return self._ops.capturable

    @property
    def ops(self) -> TorchOps:
        """What computes and moves rows."""
        return self._ops

    def over(self, collectives: Collectives) -> OpsExecutor:
        """The same stages between other ranks."""
        return OpsExecutor(self._geometry, self._layers, self._shared, self._ropes, self._ops.over(collectives))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the tables that may move, in device memory."""
        return tuple(table.data_ptr() for table in self._ropes.values())

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        streams: torch.Tensor = self._ops.embed(tokens, self._shared["embed"], streams=self._geometry.streams)
        return streams

    def project(self, spec: LayerSpec, streams: torch.Tensor, positions: torch.Tensor) -> Projected:
        rope = self._ropes[spec.attention]
        return model.project(self._ops, spec, self._layers[spec.layer], streams, positions, rope)

    def turn(self, attention: AttentionKind, rows: torch.Tensor, frames: torch.Tensor) -> None:
        self._ops.turn_rows(rows, frames, self._ropes[attention])

    def compress(
        self,
        spec: LayerSpec,
        raw: Sequence[torch.Tensor],
        table: CompressTable,
        entries: torch.Tensor,
        index_keys: torch.Tensor | None,
    ) -> None:
        rope = self._ropes[spec.attention]
        model.compress(self._ops, spec, self._layers[spec.layer], raw, table, entries, index_keys, rope)

    def select(
        self,
        spec: LayerSpec,
        own: Projected,
        index_keys: torch.Tensor,
        table: AttentionTable,
        counts: Sequence[int],
    ) -> torch.Tensor:
        rope, weights = self._ropes[spec.attention], self._layers[spec.layer]
        selected: torch.Tensor = model.select_entries(
            self._ops, spec, weights, own, index_keys, table, rope, counts
        )  # fmt: skip
        return selected

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
        partial: torch.Tensor = model.attend(
            self._ops, spec, self._layers[spec.layer], query_latent, full_rows, table, latents, entries, selected,
            restored, self._ropes[spec.attention], tap=tap,
        )  # fmt: skip
        return partial

    def mix(
        self,
        spec: LayerSpec,
        streams: torch.Tensor,
        own: Projected,
        partial: torch.Tensor,
        tokens: torch.Tensor,
        counts: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed: tuple[torch.Tensor, torch.Tensor] = model.mix(
            self._ops, spec, self._layers[spec.layer], streams, own, partial, tokens, counts
        )
        return mixed

    def salience(
        self, spec: LayerSpec, own: Projected, rows: torch.Tensor, index_keys: torch.Tensor, table: AttentionTable,
        entries: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert own.index_weights is not None, "salience is asked of CSA layers only"
        query = model.index_query(self._ops, spec, self._layers[spec.layer], own.query_latent[rows])
        sums: tuple[torch.Tensor, torch.Tensor] = self._ops.index_salience(
            query, own.index_weights[rows], index_keys, table, self._ropes[spec.attention], entries=entries
        )
        return sums

    def head(self, streams: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.head(self._ops, self._geometry, self._shared, streams)
        return logits

    def check(self) -> None:
        """Raise EngineError for what an op could only note. May wait for the device."""
        self._ops.check()
