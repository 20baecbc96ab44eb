"""Attention of the lean forward: window, compressed entries and sink in one product by blocks of queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trt_redknot.evaluation.nano.mixing import rms_norm
from trt_redknot.evaluation.nano.sizes import (
    SPARE,
    Choices,
    LayerKind,
    Selection,
    Sizes,
    Tables,
    Tensor,
    spare_bias,
    spare_keys,
)

_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotation of the last channels; cos and sin broadcast against x [..., P / 2]."""
    width = 2 * cos.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].float()
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)


def project(
    hidden: Tensor, q_a: Tensor, q_norm: Tensor, q_b: Tensor, kv_w: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor,
    head_dim: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """From hidden [R, M]: query latent [R, rank], rotated queries [R, H, D], rotated keys [R, D]."""
    latent = rms_norm(F.linear(hidden, q_a), q_norm, eps)
    q = F.linear(latent, q_b).unflatten(-1, (-1, head_dim))
    q = rotate(rms_norm(q, None, eps), cos[:, None], sin[:, None])
    return latent, q, rotate(rms_norm(F.linear(hidden, kv_w), kv_norm, eps), cos, sin)


def close(output: Tensor, cos: Tensor, sin: Tensor, o_a: Tensor, o_b: Tensor, groups: int) -> Tensor:
    """From the heads' outputs [R, H, D] to [R, M]: rotated back, projected group by group."""
    output = rotate(output, cos[:, None], -sin[:, None])
    grouped = output.flatten(1).unflatten(1, (groups, -1))
    projected = torch.einsum("rgd,gcd->rgc", grouped, o_a.unflatten(0, (groups, -1)))
    return F.linear(projected.flatten(1), o_b)


def compress(
    hidden: Tensor, kv_w: Tensor, gate_w: Tensor, bias: Tensor, norm: Tensor, ratio: int, tables: Tables, eps: float
) -> Tensor:
    """Entries of whole windows, rotated to their first token's place: [B, T, D]. Overlapping where kv is double."""
    windows = (tables.sequences, tables.tokens // ratio, ratio)
    kv = F.linear(hidden, kv_w).unflatten(0, windows)
    gate = F.linear(hidden, gate_w).unflatten(0, windows) + bias
    width = norm.shape[0]
    if kv.shape[-1] == 2 * width:
        kv = torch.cat((F.pad(kv[:, :-1, :, :width], (0, 0, 0, 0, 1, 0)), kv[..., width:]), dim=2)
        before = F.pad(gate[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        gate = torch.cat((before, gate[..., width:]), dim=2)
    pooled = (kv * gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)).sum(2)
    cos, sin = (table[: tables.tokens : ratio] for table in tables.compress)
    return rotate(rms_norm(pooled, norm, eps), cos, sin)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, sizes: Sizes) -> Tensor:
    """Scores of every entry for every token, fp32 [B, S, T].

    Args:
        q: [B, S, index heads, index dim], rotated.
        weights: fp32 [B, S, index heads].
        keys: [B, T, index dim].
    """
    dots = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).relu().unflatten(1, q.shape[1:3])
    scaled = weights * (sizes.index_heads * sizes.index_dim) ** -0.5
    return torch.matmul(scaled.to(dots.dtype).unsqueeze(2), dots).squeeze(2).float()


def chosen(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Whether an entry is among the best `k` visible ones of its row: bool [B, S, T]."""
    masked = scores.masked_fill(~visible, float("-inf"))
    if masked.shape[-1] <= k:
        return visible.expand(masked.shape)
    best = masked.topk(k, dim=-1, sorted=False).indices
    return torch.zeros_like(masked, dtype=torch.bool).scatter_(-1, best, True) & visible


def far_mask(kind: LayerKind, scores: Tensor | None, choices: Choices, tables: Tables, k: int) -> Tensor:
    """Which entries each token attends to, bool [B or 1, S, T].

    Args:
        scores: of the sequences that are not dense, fp32 [B - dense, S, T]; None without an Indexer.
    """
    visible = tables.visible(kind.ratio)[None]
    places = torch.arange(tables.sequences, device=visible.device)
    if scores is None:
        if choices.fine.start == choices.fine.stop:
            return visible
        seeing = (places < choices.fine.start) | (places >= choices.fine.stop)
        seen: Tensor = visible & seeing[:, None, None]
        return seen
    parts = [visible.expand(choices.dense, -1, -1), chosen(scores, visible, k)]
    allowed = torch.cat(parts) if choices.dense else parts[1]
    late = choices.late if kind.first else 0
    if late or choices.muted:
        seeing = (places >= late) & (places < tables.sequences - choices.muted)
        allowed = allowed & seeing[:, None, None]
    return allowed


def attend(
    q: Tensor, kv: Tensor, sinks: Tensor, entries: Tensor | None, allowed: Tensor | None, zeros: Tensor | None,
    choices: Choices, tables: Tables, sizes: Sizes,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention over the window, the allowed entries and the sink.

    Args:
        q, kv: [R, H, D] and [R, D], rotated.
        entries, allowed: [B, T, D], and which of them each token attends to, bool [B or 1, S, T].
        zeros: how many entries that are zero each token attends to, [S]; instead of entries.

    Returns:
        outputs [R, H, D]; the attention mass of the entries at the watched tokens of dense sequences, mean over
        heads, fp32 [dense, S', T], without gradient, or None without entries or without dense sequences.
    """
    block, width = sizes.block, sizes.head_dim
    blocks = (tables.sequences, tables.tokens // block)
    own = kv.unflatten(0, (*blocks, block))
    parts = [F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own]
    bias = torch.zeros((1, tables.tokens, 2 * block), dtype=q.dtype, device=q.device)
    bias = bias.masked_fill(~tables.near(sizes.window, block), float("-inf"))
    if entries is not None and allowed is not None:
        parts.append(entries[:, None].expand(-1, blocks[1], -1, -1))
        far = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill_(~allowed, float("-inf"))
        bias = torch.cat((bias.expand(far.shape[0], -1, -1), far), dim=-1)
    real = bias.shape[-1]
    extra = spare_keys(real)
    bias = torch.cat((bias, spare_bias(bias, extra, None if zeros is None else zeros.log()[None].to(q.dtype))), dim=-1)
    keys = F.pad(torch.cat(parts, dim=2), (0, SPARE, 0, extra)).flatten(0, 1)
    keys[:, real, width] = 1
    sink = (sinks * width**0.5).to(q.dtype)[None, :, None].expand(q.shape[0], -1, 1)
    wide = torch.cat((q, sink, q.new_zeros(*q.shape[:2], SPARE - 1)), dim=-1)
    wide = wide.unflatten(0, (-1, block)).transpose(1, 2)
    bias = bias.expand(tables.sequences, -1, -1).reshape(-1, 1, block, bias.shape[-1])
    shape = (*wide.shape[:2], keys.shape[1], -1)
    with sdpa_kernel(_BACKENDS, set_priority=True):
        output = F.scaled_dot_product_attention(
            wide, keys[:, None].expand(shape), keys[:, None, :, :width].expand(shape),
            attn_mask=bias.expand(-1, wide.shape[1], -1, -1), scale=width**-0.5,
        )  # fmt: skip
    mass = None
    if entries is not None and choices.dense:
        count = choices.dense * blocks[1]
        mass = _mass(wide[:count], keys[:count], bias[:count], choices.watched, width)
        mass = mass[..., 2 * block : real].unflatten(0, (choices.dense, blocks[1])).flatten(1, 2)
    return output.transpose(1, 2).flatten(0, 1), mass


@torch.no_grad()
def _mass(q: Tensor, keys: Tensor, bias: Tensor, watched: Tensor, width: int) -> Tensor:
    """Shares of the keys at the watched tokens of each block, mean over heads, fp32 [blocks, W', K]."""
    logits = (q.index_select(2, watched) @ keys[:, None].transpose(-1, -2)).float() * width**-0.5
    mass: Tensor = (logits + bias.index_select(2, watched)).softmax(-1).mean(1)
    return mass


def watched_rows(x: Tensor, choices: Choices, tables: Tables, block: int) -> Tensor:
    """The watched tokens' rows of dense sequences, [dense, S', ...] of x [R, ...]."""
    blocked = x.unflatten(0, (tables.sequences, -1, block))[: choices.dense]
    rows: Tensor = blocked.index_select(2, choices.watched).flatten(1, 2)
    return rows


def selection_of(scores: Tensor, mass: Tensor, visible: Tensor, choices: Choices, block: int) -> Selection:
    seen = visible.unflatten(0, (-1, block)).index_select(1, choices.watched).flatten(0, 1)
    return Selection(scores=scores, mass=mass, visible=seen)
