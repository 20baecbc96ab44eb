"""A lean training forward of DeepSeek-V4 layers: functions of a layer's own parameters, without caches.

The same mathematics as the network that transformers builds, arranged for training on a GPU: shapes never depend on
data and nothing waits for the GPU, so that a whole training step is one CUDA graph; attention in blocks of queries,
all experts as one product. What works row by row gets all rows of a batch flat, so it is the same for every length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trt_redknot.evaluation.nano.attention import (
    attend,
    close,
    compress,
    far_mask,
    index_scores,
    project,
    rotate,
    selection_of,
    watched_rows,
)
from trt_redknot.evaluation.nano.experts import expert_products, route
from trt_redknot.evaluation.nano.mixing import mix_back, read_streams, sinkhorn
from trt_redknot.evaluation.nano.sizes import Choices, LayerKind, Parameters, Selection, Sizes, Tables, Tensor

_INDEXER = "self_attn.compressor.indexer"


@dataclass(frozen=True, kw_only=True)
class RowFunctions:
    """The functions that work row by row: as they are, or compiled."""

    read_streams: Callable[..., Any] = read_streams
    mix_back: Callable[..., Any] = mix_back
    project: Callable[..., Any] = project
    close: Callable[..., Any] = close
    experts: Callable[..., Any] = expert_products

    @classmethod
    def compiled(cls) -> RowFunctions:
        """One compilation each serves every layer and every length, for their shapes are those of a whole batch."""
        functions = (read_streams, mix_back, project, close, expert_products)
        made: list[Callable[..., Any]] = [torch.compile(f, dynamic=False, fullgraph=True) for f in functions]
        return cls(read_streams=made[0], mix_back=made[1], project=made[2], close=made[3], experts=made[4])


def attention(
    hidden: Tensor, p: Parameters, kind: LayerKind, tables: Tables, choices: Choices, sizes: Sizes, rows: RowFunctions
) -> tuple[Tensor, Selection | None]:
    """Attention of one layer, [R, M] to [R, M]."""
    cos, sin = tables.rope(kind)
    latent, q, kv = rows.project(
        hidden, p["self_attn.q_a_proj.weight"], p["self_attn.q_a_norm.weight"], p["self_attn.q_b_proj.weight"],
        p["self_attn.kv_proj.weight"], p["self_attn.kv_norm.weight"], cos, sin, sizes.head_dim, sizes.norm_eps,
    )  # fmt: skip
    entries, allowed, zeros, scores = None, None, None, None
    if kind.ratio:
        visible = tables.visible(kind.ratio)
        choice = None
        if kind.indexer:
            scores, choice = _indexed(hidden, latent, p, kind, tables, choices, sizes)
        if kind.silent:
            zeros = visible.sum(-1).clamp(max=sizes.index_topk).float() if kind.indexer else visible.sum(-1).float()
        else:
            entries = _compressed(hidden, p, "self_attn.compressor", kind.ratio, tables, sizes)
            allowed = far_mask(kind, choice, choices, tables, sizes.index_topk)
    output, mass = attend(q, kv, p["self_attn.sinks"], entries, allowed, zeros, choices, tables, sizes)
    selection = None
    if scores is not None:
        mass = torch.zeros_like(scores) if mass is None else mass
        selection = selection_of(scores, mass, visible, choices, sizes.block)
    projected = rows.close(output, cos, sin, p["self_attn.o_a_proj.weight"], p["self_attn.o_b_proj.weight"],
                           sizes.groups)  # fmt: skip
    return projected, selection


def _compressed(hidden: Tensor, p: Parameters, prefix: str, ratio: int, tables: Tables, sizes: Sizes) -> Tensor:
    return compress(
        hidden, p[f"{prefix}.kv_proj.weight"], p[f"{prefix}.gate_proj.weight"], p[f"{prefix}.position_bias"],
        p[f"{prefix}.kv_norm.weight"], ratio, tables, sizes.norm_eps,
    )  # fmt: skip


def _indexed(
    hidden: Tensor, latent: Tensor, p: Parameters, kind: LayerKind, tables: Tables, choices: Choices, sizes: Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """The Indexer's scores: with gradient where dense sequences are watched, without it where they choose.

    Nothing flows back into the layer's own inputs.
    """
    hidden, latent = hidden.detach(), latent.detach()
    keys = _compressed(hidden, p, _INDEXER, kind.ratio, tables, sizes)
    cos, sin = tables.rope(kind)
    q = F.linear(latent, p[f"{_INDEXER}.q_b_proj.weight"]).unflatten(-1, (sizes.index_heads, sizes.index_dim))
    q = rotate(q, cos[:, None], sin[:, None])
    weights = F.linear(hidden, p[f"{_INDEXER}.scorer.weights_proj.weight"]).float()
    watched, choice = None, None
    if choices.dense:
        watched = index_scores(
            watched_rows(q, choices, tables, sizes.block), watched_rows(weights, choices, tables, sizes.block),
            keys[: choices.dense], sizes,
        )  # fmt: skip
    if not kind.silent:
        with torch.no_grad():
            free_q, free_weights = (x.unflatten(0, (tables.sequences, -1))[choices.dense :] for x in (q, weights))
            choice = index_scores(free_q, free_weights, keys[choices.dense :], sizes)
    return watched, choice


def layer_forward(
    streams: Tensor, tokens: Tensor, p: Parameters, kind: LayerKind, tables: Tables, choices: Choices, sizes: Sizes,
    rows: RowFunctions, dtype: torch.dtype,
) -> tuple[Tensor, Selection | None]:  # fmt: skip
    """One layer: streams fp32 [R, N, M] in and out, and what its Indexer did. `dtype` is that of its products."""

    def read(prefix: str, norm: str) -> tuple[Tensor, Tensor, Tensor]:
        hidden, post, logits = rows.read_streams(
            streams, p[f"{prefix}.fn"], p[f"{prefix}.base"], p[f"{prefix}.scale"], p[norm], sizes.norm_eps,
            sizes.hc_eps, dtype,
        )  # fmt: skip
        return hidden, post, sinkhorn(logits, sizes.sinkhorn, sizes.hc_eps)

    hidden, post, comb = read("attn_hc", "input_layernorm.weight")
    output, selection = attention(hidden, p, kind, tables, choices, sizes, rows)
    streams = rows.mix_back(streams, output, post, comb)
    hidden, post, comb = read("ffn_hc", "post_attention_layernorm.weight")
    output = rows.experts(
        hidden, route(hidden, tokens, p, kind, sizes), p["mlp.experts.gate_up_proj"], p["mlp.experts.down_proj"],
        *(p[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")), sizes.swiglu_limit,
    )  # fmt: skip
    return rows.mix_back(streams, output, post, comb), selection
