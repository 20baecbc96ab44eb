"""A lean training forward of DeepSeek-V4 layers: functions of a layer's own parameters, without caches.

The same mathematics as the network that transformers builds, arranged for training: sliding attention in blocks of the
window instead of over all keys, all experts as one product, one function a layer, so that layers of one kind share one
compilation. Shapes: B sequences, S tokens, M hidden, H heads, D head width, T compressed entries, N streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What decides a layer's graph: its compression ratio (0: none), whether it has an Indexer, how it routes."""

    ratio: int
    indexer: bool
    hashed: bool


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The scalars of a configuration that the layer functions use."""

    heads: int
    head_dim: int
    rope_dim: int
    groups: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    routed_scale: float
    swiglu_limit: float
    streams: int
    sinkhorn: int
    hc_eps: float
    norm_eps: float
    scoring: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Per sequence of a batch, bool [B]: attend only to the Indexer's choice; leave the compressed entries out."""

    sparse: Tensor
    mute: Tensor


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the Indexer of a layer scored and what its attention used, fp32 [B, S, T]."""

    scores: Tensor
    mass: Tensor
    visible: Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotation of the last channels; cos and sin broadcast against x [..., P / 2]."""
    width = 2 * cos.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].float()
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)


def hyper_connection(streams: Tensor, p: Parameters, prefix: str, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """(collapsed [B, S, M], post [B, S, N], comb [B, S, N, N]), computed in fp32."""
    n = sizes.streams
    with torch.autocast(streams.device.type, enabled=False):
        flat = rms_norm(streams.flatten(2).float(), None, sizes.norm_eps)
        weights = F.linear(flat, p[f"{prefix}.fn"])
        pre_w, post_w, comb_w = weights.split([n, n, n * n], dim=-1)
        pre_b, post_b, comb_b = p[f"{prefix}.base"].split([n, n, n * n])
        scale = p[f"{prefix}.scale"]
        pre = torch.sigmoid(pre_w * scale[0] + pre_b) + sizes.hc_eps
        post = 2 * torch.sigmoid(post_w * scale[1] + post_b)
        comb = (comb_w * scale[2] + comb_b).unflatten(-1, (n, n)).softmax(-1) + sizes.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + sizes.hc_eps)
        for _ in range(sizes.sinkhorn - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + sizes.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + sizes.hc_eps)
        collapsed = (pre.unsqueeze(-1) * streams).sum(2)
    return collapsed.to(streams.dtype), post, comb


def mix_back(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    with torch.autocast(streams.device.type, enabled=False):
        return post.unsqueeze(-1) * output.float().unsqueeze(-2) + comb.transpose(-1, -2) @ streams


def compress(hidden: Tensor, p: Parameters, prefix: str, ratio: int, rope: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Entries of whole windows, rotated to their first token's position: [B, T, D]. Overlapping where kv is double."""
    kv = F.linear(hidden, p[f"{prefix}.kv_proj.weight"])
    gate = F.linear(hidden, p[f"{prefix}.gate_proj.weight"])
    windows = hidden.shape[1] // ratio
    kv = kv[:, : windows * ratio].unflatten(1, (windows, ratio))
    gate = gate[:, : windows * ratio].unflatten(1, (windows, ratio)) + p[f"{prefix}.position_bias"]
    width = p[f"{prefix}.kv_norm.weight"].shape[0]
    if kv.shape[-1] == 2 * width:
        kv = torch.cat((F.pad(kv[:, :-1, :, :width], (0, 0, 0, 0, 1, 0)), kv[..., width:]), dim=2)
        before = F.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        gate = torch.cat((before, gate[..., width:]), dim=2)
    pooled = (kv * gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)).sum(2)
    pooled = rms_norm(pooled, p[f"{prefix}.kv_norm.weight"], eps)
    return rotate(pooled, rope[0][: windows * ratio : ratio], rope[1][: windows * ratio : ratio])


def index_scores(
    hidden: Tensor, query_latent: Tensor, p: Parameters, ratio: int, rope: tuple[Tensor, Tensor], sizes: Sizes
) -> Tensor:
    """Scores of every entry for every token, fp32 [B, S, T]; nothing flows back into the inputs."""
    hidden, query_latent = hidden.detach(), query_latent.detach()
    prefix = "self_attn.compressor.indexer"
    keys = compress(hidden, p, prefix, ratio, rope, sizes.norm_eps)
    q = F.linear(query_latent, p[f"{prefix}.q_b_proj.weight"]).unflatten(-1, (sizes.index_heads, sizes.index_dim))
    q = rotate(q, rope[0][:, None], rope[1][:, None])
    weights = F.linear(hidden, p[f"{prefix}.scorer.weights_proj.weight"]).float() * sizes.index_heads**-0.5
    dots = F.relu(torch.einsum("bshi,bti->bsht", q, keys).float()) * sizes.index_dim**-0.5
    scores: Tensor = (dots * weights.unsqueeze(-1)).sum(2)
    return scores


def chosen(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Whether an entry is among the best `k` visible ones of its row: bool [B, S, T]."""
    masked = scores.detach().masked_fill(~visible, float("-inf"))
    if masked.shape[-1] <= k:
        return visible
    best = masked.topk(k, dim=-1).indices
    return torch.zeros_like(masked, dtype=torch.bool).scatter_(-1, best, True) & visible


def attention(
    hidden: Tensor, p: Parameters, kind: LayerKind, rope: tuple[Tensor, Tensor], choices: Choices, sizes: Sizes
) -> tuple[Tensor, Selection | None]:
    """Attention of one layer, [B, S, M] to [B, S, M]; S is a multiple of the window."""
    tokens = hidden.shape[1]
    cos, sin = rope[0][:tokens], rope[1][:tokens]
    latent = rms_norm(F.linear(hidden, p["self_attn.q_a_proj.weight"]), p["self_attn.q_a_norm.weight"], sizes.norm_eps)
    q = F.linear(latent, p["self_attn.q_b_proj.weight"]).unflatten(-1, (sizes.heads, sizes.head_dim))
    q = rotate(rms_norm(q, None, sizes.norm_eps), cos[:, None], sin[:, None]).transpose(1, 2)
    kv = rms_norm(F.linear(hidden, p["self_attn.kv_proj.weight"]), p["self_attn.kv_norm.weight"], sizes.norm_eps)
    kv = rotate(kv, cos, sin)
    blocks = tokens // sizes.window
    own = kv.unflatten(1, (blocks, sizes.window))
    keys = torch.cat((F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own), dim=2)[:, None]
    near = (q.unflatten(2, (blocks, sizes.window)) @ keys.transpose(-1, -2)).flatten(2, 3).float()
    logits = [(near * sizes.head_dim**-0.5).masked_fill(~_near_mask(tokens, sizes.window, q.device), float("-inf"))]
    selection, entries, scores = None, None, None
    if kind.ratio:
        entries = compress(hidden, p, "self_attn.compressor", kind.ratio, rope, sizes.norm_eps)
        places = torch.arange(tokens, device=q.device)
        visible = (torch.arange(entries.shape[1], device=q.device) < ((places + 1) // kind.ratio)[:, None])[None]
        visible = visible.expand(q.shape[0], -1, -1)
        allowed = visible
        if kind.indexer:
            scores = index_scores(hidden, latent, p, kind.ratio, rope, sizes)
            sparse = chosen(scores, visible, sizes.index_topk)
            allowed = (sparse | (visible & ~choices.sparse[:, None, None])) & ~choices.mute[:, None, None]
        far = (q @ entries[:, None].transpose(-1, -2)).float() * sizes.head_dim**-0.5
        logits.append(far.masked_fill(~allowed[:, None], float("-inf")))
    sinks = p["self_attn.sinks"].float()[None, :, None, None].expand(q.shape[0], -1, tokens, 1)
    shares = torch.cat([*logits, sinks], dim=-1).softmax(-1).to(kv.dtype)
    span = 2 * sizes.window
    output = (shares[..., :span].unflatten(2, (blocks, sizes.window)) @ keys).flatten(2, 3)
    if entries is not None:
        far_shares = shares[..., span:-1]
        output = output + far_shares @ entries[:, None]
        if scores is not None:
            selection = Selection(scores=scores, mass=far_shares.detach().float().mean(1), visible=visible)
    output = rotate(output.transpose(1, 2), cos[:, None], -sin[:, None])
    grouped = output.unflatten(2, (sizes.groups, sizes.heads // sizes.groups)).flatten(3)
    w_a = p["self_attn.o_a_proj.weight"].unflatten(0, (sizes.groups, -1))
    projected = torch.einsum("bsgd,gcd->bsgc", grouped, w_a).flatten(2)
    return F.linear(projected, p["self_attn.o_b_proj.weight"]), selection


def _near_mask(tokens: int, window: int, device: torch.device) -> Tensor:
    """bool [S, 2 W]: keys of the block before and the own block that lie in the window of each token."""
    places = torch.arange(tokens, device=device)
    first = (places // window - 1) * window
    keys = first[:, None] + torch.arange(2 * window, device=device)
    return (keys >= 0) & (keys <= places[:, None]) & (keys > places[:, None] - window)


def experts(hidden: Tensor, tokens: Tensor, p: Parameters, kind: LayerKind, sizes: Sizes) -> Tensor:
    """Routed and shared experts, [B, S, M]; every expert runs on every row, the router's zeros drop the others."""
    flat = hidden.flatten(0, 1)
    scores = sizes.scoring(F.linear(flat, p["mlp.gate.weight"]).float())
    if kind.hashed:
        ids = p["mlp.gate.tid2eid"][tokens.flatten()]
    else:
        ids = (scores + p["mlp.gate.e_score_correction_bias"]).topk(sizes.experts_per_token, dim=-1).indices
    picked = scores.gather(1, ids)
    picked = picked / (picked.sum(-1, keepdim=True) + 1e-20) * sizes.routed_scale
    weights = torch.zeros_like(scores).scatter(1, ids, picked)
    up = torch.einsum("rm,efm->ref", flat, p["mlp.experts.gate_up_proj"])
    gate, up = up.chunk(2, dim=-1)
    active = F.silu(gate.clamp(max=sizes.swiglu_limit)) * up.clamp(-sizes.swiglu_limit, sizes.swiglu_limit)
    active = active * weights.unsqueeze(-1).to(active.dtype)
    routed = torch.einsum("ref,emf->rm", active, p["mlp.experts.down_proj"])
    shared = "mlp.shared_experts"
    gate = F.linear(flat, p[f"{shared}.gate_proj.weight"]).clamp(max=sizes.swiglu_limit)
    up = F.linear(flat, p[f"{shared}.up_proj.weight"]).clamp(-sizes.swiglu_limit, sizes.swiglu_limit)
    output: Tensor = routed + F.linear(F.silu(gate) * up, p[f"{shared}.down_proj.weight"])
    return output.view(hidden.shape)


def layer_forward(
    streams: Tensor, tokens: Tensor, p: Parameters, kind: LayerKind, rope: tuple[Tensor, Tensor], choices: Choices,
    sizes: Sizes,
) -> tuple[Tensor, Selection | None]:  # fmt: skip
    """One layer: streams [B, S, N, M] in and out, and what its Indexer did."""
    collapsed, post, comb = hyper_connection(streams, p, "attn_hc", sizes)
    hidden = rms_norm(collapsed, p["input_layernorm.weight"], sizes.norm_eps)
    output, selection = attention(hidden, p, kind, rope, choices, sizes)
    streams = mix_back(streams, output, post, comb)
    collapsed, post, comb = hyper_connection(streams, p, "ffn_hc", sizes)
    hidden = rms_norm(collapsed, p["post_attention_layernorm.weight"], sizes.norm_eps)
    return mix_back(streams, experts(hidden, tokens, p, kind, sizes), post, comb), selection
