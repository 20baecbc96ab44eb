"""One DeepSeek-V4 layer as four stages over named ops.

A layer runs stage by stage over row chunks, because a row's keys may be latents of any other row:

    project   every chunk   own rows: streams -> query latent, latent, raw compressor rows, Indexer query
    compress  once          raw rows -> compressed entries, Indexer keys
    attend    every chunk   all heads of this rank on the chunk's rows, W_a split, restoration, W_b
    mix       every chunk   own rows: streams after attention, router, experts, streams after the FFN

"Own" rows are the rank's share of the residual streams; only small per-row outputs are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RouterKind
from trt_redknot.model.spec import LayerSpec
from trt_redknot.ops.interface import Ops, RowCount, Tensor
from trt_redknot.ops.tables import AttentionTable, CompressTable

Weights = Mapping[str, Tensor]

# What the normed rows of a block go through first: query and latent, raw rows of the compressor and of the Indexer, the
# weights of the Indexer's heads.
_COMPRESSOR = ("compressor.kv", "compressor.gate")
_INDEXER = ("indexer.kv", "indexer.gate", "indexer.weights")
PROJECTIONS = {
    AttentionKind.SLIDING: ("attn.q_a", "attn.kv"),
    AttentionKind.HCA: ("attn.q_a", "attn.kv", *_COMPRESSOR),
    AttentionKind.CSA: ("attn.q_a", "attn.kv", *_COMPRESSOR, *_INDEXER),
}


@dataclass(frozen=True, kw_only=True)
class Projected:
    """Own rows of a chunk after `project`. Raw rows are kv, gate of the compressor, then of the Indexer."""

    query_latent: Tensor
    latent: Tensor
    post: Tensor
    comb: Tensor
    raw: tuple[Tensor, ...]
    index_weights: Tensor | None


def project(ops: Ops, spec: LayerSpec, weights: Weights, streams: Tensor, positions: Tensor, rope: Tensor) -> Projected:
    """Own rows of a chunk: streams [R, S, M], positions [R]."""
    g = spec.geometry
    hidden, post, comb = ops.hyper_connection_pre(
        streams, weights["attn_hc.fn"], weights["attn_hc.base"], weights["attn_hc.scale"], weights["attn_norm"],
        iterations=g.sinkhorn_iterations, eps=g.hc_eps, norm_eps=g.norm_eps,
    )  # fmt: skip
    query, latent, *raw = ops.linears(hidden, [weights[name] for name in PROJECTIONS[spec.attention]])
    query_latent = ops.rms_norm(query, weights["attn.q_norm"], eps=g.norm_eps)
    latent = ops.norm_rope_pack(latent, weights["attn.kv_norm"], rope, positions, eps=g.norm_eps)
    index_weights = raw.pop() if spec.attention is AttentionKind.CSA else None
    return Projected(
        query_latent=query_latent, latent=latent, post=post, comb=comb, raw=tuple(raw), index_weights=index_weights
    )


def compress(
    ops: Ops,
    spec: LayerSpec,
    weights: Weights,
    raw: Sequence[Tensor],
    table: CompressTable,
    entries: Tensor,
    index_keys: Tensor | None,
    rope: Tensor,
) -> None:
    """Pool raw rows of the whole step into the entry pools, in place."""
    eps = spec.geometry.norm_eps
    pooled = ops.compress(raw[0], raw[1], weights["compressor.ape"], weights["compressor.norm"], rope, table, eps=eps)
    ops.write_rows(entries, table.entries, pooled)
    if spec.attention is AttentionKind.CSA:
        keys = ops.compress(raw[2], raw[3], weights["indexer.ape"], weights["indexer.norm"], rope, table, eps=eps)
        ops.write_rows(index_keys, table.entries, keys)


def index_query(ops: Ops, spec: LayerSpec, weights: Weights, query_latent: Tensor) -> Tensor:
    """Indexer queries of own rows, not yet rotated: [R, index heads, I]."""
    g = spec.geometry
    return ops.split_heads(ops.linear(query_latent, weights["indexer.q_b"]), dim=g.index_dim)


def select_entries(
    ops: Ops,
    spec: LayerSpec,
    weights: Weights,
    projected: Projected,
    index_keys: Tensor,
    table: AttentionTable,
    rope: Tensor,
    counts: Sequence[int],
) -> Tensor:
    """Entries each row of a chunk attends to: own rows score, all ranks gather: [rows of the chunk, top_k]."""
    query = index_query(ops, spec, weights, projected.query_latent)
    own = ops.lightning_indexer(query, projected.index_weights, index_keys, table, rope, top_k=spec.geometry.index_topk)
    return ops.all_gather(own, counts)


def attend(
    ops: Ops,
    spec: LayerSpec,
    weights: Weights,
    query_latent: Tensor,
    full_rows: RowCount,
    table: AttentionTable,
    latents: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
    restored: Tensor,
    rope: Tensor,
    *,
    tap: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """This rank's share of a chunk's attention output, before the sum over ranks: [R, M].

    The first `full_rows` rows run all heads; the rest run Global heads and take `restored` [R - full_rows, G * C].
    `tap` is shown the online Local contribution [full_rows, G * C] (the artifact producer keeps it).
    """
    g = spec.geometry
    q_global = ops.split_heads(ops.linear(query_latent, weights["attn.q_b_global"]), dim=g.head_dim)
    full_latent = ops.first_rows(query_latent, full_rows)
    q_local = ops.split_heads(ops.linear(full_latent, weights["attn.q_b_local"]), dim=g.head_dim)
    out_global, out_local = ops.seg_latent_attention(
        ops.query_norm(q_global, eps=g.norm_eps), ops.query_norm(q_local, eps=g.norm_eps), table, latents, entries,
        selected, weights["attn.sinks_global"], weights["attn.sinks_local"], rope, window=g.window,
    )  # fmt: skip
    local = ops.grouped_linear(out_local, weights["attn.o_a_local"])
    if tap is not None:
        tap(local)
    state = ops.restore_replace(ops.grouped_linear(out_global, weights["attn.o_a_global"]), local, restored)
    return ops.linear(state, weights["attn.o_b"])


def feed_forward(
    ops: Ops, spec: LayerSpec, weights: Weights, streams: Tensor, tokens: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Own rows of a chunk through router and experts: (streams [R, S, M], expert ids [R, k]).

    The experts are spread over ranks, so the chunk's normed rows meet on every rank and its sums go back to the owners.
    """
    g = spec.geometry
    hidden, post, comb = ops.hyper_connection_pre(
        streams, weights["ffn_hc.fn"], weights["ffn_hc.base"], weights["ffn_hc.scale"], weights["ffn_norm"],
        iterations=g.sinkhorn_iterations, eps=g.hc_eps, norm_eps=g.norm_eps,
    )  # fmt: skip
    if spec.router is RouterKind.HASH:
        ids, shares = ops.route_hash(
            hidden, weights["router.weight"], weights["router.tid2eid"], tokens, scale=g.routed_scale, scoring=g.scoring
        )
    else:
        ids, shares = ops.route_learned(
            hidden, weights["router.weight"], weights["router.bias"],
            top_k=g.experts_per_token, scale=g.routed_scale, scoring=g.scoring, tau=spec.tau,
        )  # fmt: skip
    partial = ops.experts(
        ops.all_gather(hidden, counts), ops.all_gather(ids, counts), ops.all_gather(shares, counts),
        weights["experts.gate_up"], weights["experts.down"], first=spec.first_expert, limit=g.swiglu_limit,
    )  # fmt: skip
    shared = ops.shared_expert(
        hidden, weights["shared.gate"], weights["shared.up"], weights["shared.down"], limit=g.swiglu_limit
    )
    output = ops.add(ops.reduce_scatter(partial, counts), shared)
    return ops.hyper_connection_post(streams, output, post, comb), ids


def mix(
    ops: Ops,
    spec: LayerSpec,
    weights: Weights,
    streams: Tensor,
    projected: Projected,
    attention_partial: Tensor,
    tokens: Tensor,
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Own rows of a chunk, from the attention's partial sums to the layer's output streams, and their expert ids."""
    output = ops.reduce_scatter(attention_partial, counts)
    streams = ops.hyper_connection_post(streams, output, projected.post, projected.comb)
    return feed_forward(ops, spec, weights, streams, tokens, counts)


def head(ops: Ops, g: ModelGeometry, weights: Weights, streams: Tensor) -> Tensor:
    """Logits of rows over this rank's share of the vocabulary: [R, V of the rank]."""
    hidden = ops.hyper_head(
        streams, weights["hc_head.fn"], weights["hc_head.base"], weights["hc_head.scale"], weights["norm"],
        eps=g.hc_eps, norm_eps=g.norm_eps,
    )  # fmt: skip
    return ops.linear(hidden, weights["head"])
