"""The named ops the network is written over. A backend implements them; `model/` calls nothing else.

`Tensor` is whatever the backend computes with: torch tensors for `torch`, network tensors for `tensorrt`.
Shape suffixes are those of :mod:`trt_redknot.config.geometry`; `R1` are the rows that run all heads (R1 <= R, they
come first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trt_redknot.ops.tables import AttentionTable, CompressTable

Tensor = Any
# A number of rows: an int for `torch`, a size of the network for `tensorrt`.
RowCount = Any


class Ops(Protocol):
    """One method an op; docs/add-an-op.md says how to add one."""

    def embed(self, tokens_R: Tensor, table_VM: Tensor, *, streams: int) -> Tensor:
        """Token rows copied into every residual stream: [R, S, M]."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T, no bias."""

    def linears(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`linear` of the same rows through each of several weights."""

    def split_heads(self, x: Tensor, *, dim: int) -> Tensor:
        """The channels of every head: [R, H * dim] -> [R, H, dim]."""

    def first_rows(self, x: Tensor, count: RowCount) -> Tensor:
        """The first `count` rows."""

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """RMS norm over the last axis, in fp32, rounded once."""

    def hyper_connection_pre(
        self,
        streams_RSM: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm_M: Tensor,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """mHC before a block, with the block's RMS norm: (normed input [R, M], post [R, S], comb [R, S, S])."""

    def hyper_connection_post(
        self, streams_RSM: Tensor, output_RM: Tensor, post_RS: Tensor, comb_RSS: Tensor
    ) -> Tensor:
        """mHC after a block: post * output + comb^T streams, [R, S, M]."""

    def hyper_head(
        self,
        streams_RSM: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm_M: Tensor,
        *,
        eps: float,
        norm_eps: float,
    ) -> Tensor:
        """Collapse the streams before the head, with the final norm: [R, M]."""

    def norm_rope_pack(
        self, latents_RD: Tensor, norm_D: Tensor, rope: Tensor, positions_R: Tensor, *, eps: float
    ) -> Tensor:
        """Latents normed and rotated to their positions: [R, D]."""

    def query_norm(self, q_RHD: Tensor, *, eps: float) -> Tensor:
        """RMS norm of every head without weight: [R, H, D]. Rotation happens per segment inside attention."""

    def compress(
        self, kv: Tensor, gate: Tensor, ape: Tensor, norm: Tensor, rope: Tensor, table: CompressTable, *, eps: float
    ) -> Tensor:
        """Gated pooling of raw rows into entries, norm, rope: kv, gate [rows, w * D] -> [E, D]."""

    def turn_rows(self, rows_RD: Tensor, frames_R: Tensor, rope: Tensor) -> None:
        """Rows of documents, from their documents' frames to the request's, in place: the last channels are turned by
        the angles of the positions where the documents begin."""

    def write_rows(self, pool: Tensor, rows: Tensor, values: Tensor) -> None:
        """pool[rows] = values, in place."""

    def lightning_indexer(
        self, q_RHI: Tensor, weights_RH: Tensor, keys_EI: Tensor, table: AttentionTable, rope: Tensor, *, top_k: int
    ) -> Tensor:
        """Pool rows of the best visible entries of each row, best first, ties to the earlier entry, -1 where there are
        fewer than `top_k`: int64 [R, top_k]."""

    def index_salience(
        self, q_RHI: Tensor, weights_RH: Tensor, keys_EI: Tensor, table: AttentionTable, rope: Tensor, *, entries: int
    ) -> tuple[Tensor, Tensor]:
        """For rows of one sequence: the sum of the scores they give each entry, and how many of them see it: [E],
        [E]."""

    def seg_latent_attention(
        self,
        q_global: Tensor,
        q_local: Tensor,
        table: AttentionTable,
        latents: Tensor,
        entries: Tensor | None,
        selected: Tensor | None,
        sinks_global: Tensor,
        sinks_local: Tensor,
        rope: Tensor,
        *,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """Attention over a segment table: Global heads on R rows, Local heads on the first R1.

        `entries` None: sliding window only. `selected` None: every visible entry (HCA), else those rows of the pool
        (CSA).
        Outputs carry inverse output RoPE: [R, Hg, D], [R1, Hl, D].
        """

    def grouped_linear(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Heads of each output group through the group's weight: [R, G * h, D], [G, C, h * D] -> [R, G * C]."""

    def restore_replace(self, global_RZ: Tensor, local_R1Z: Tensor, restored: Tensor) -> Tensor:
        """Projected state: Global + online Local on the first R1 rows, Global + restored Local on the other R - R1."""

    def route_learned(
        self, x_RM: Tensor, weight_XM: Tensor, bias_X: Tensor, *, top_k: int, scale: float, scoring: str, tau: float
    ) -> tuple[Tensor, Tensor]:
        """(expert ids int64 [R, k], weights [R, k]), heaviest first; experts dropped by adaptive fanout are -1 with
        0."""

    def route_hash(
        self, x_RM: Tensor, weight_XM: Tensor, table_Vk: Tensor, tokens_R: Tensor, *, scale: float, scoring: str
    ) -> tuple[Tensor, Tensor]:
        """The same by the token's row of a fixed table. Raises where a token is outside the table."""

    def experts(
        self,
        x_RM: Tensor,
        ids_Rk: Tensor,
        weights_Rk: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        first: int,
        limit: float,
    ) -> Tensor:
        """Weighted sum over the experts `first`, `first + 1`, ... held here; rows of other experts add nothing: [R,
        M]."""

    def shared_expert(self, x_RM: Tensor, gate_FM: Tensor, up_FM: Tensor, down_MF: Tensor, *, limit: float) -> Tensor:
        """Clamped SwiGLU: [R, M]."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""

    def all_gather(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all ranks in rank order."""

    def reduce_scatter(self, partial: Tensor, counts: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over ranks."""
