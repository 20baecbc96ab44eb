"""Hyper-connections: how a layer reads the residual streams and writes them back. In fp32, row by row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trt_redknot.evaluation.nano.sizes import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def read_streams(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, norm_eps: float, hc_eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What the layer's function gets, and how its output goes back.

    Args:
        streams: fp32 [R, N, M].

    Returns:
        hidden [R, M] of `dtype`, normed; post fp32 [R, N]; logits of the mixing matrix, fp32 [N, N, R].
    """
    n = streams.shape[1]
    with torch.autocast(streams.device.type, enabled=False):
        flat = streams.flatten(1)
        weights = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        pre_w, post_w, comb_w = weights.split([n, n, n * n], dim=-1)
        pre_b, post_b, comb_b = base.split([n, n, n * n])
        pre = torch.sigmoid(pre_w * scale[0] + pre_b) + hc_eps
        post = 2 * torch.sigmoid(post_w * scale[1] + post_b)
        comb = (comb_w * scale[2] + comb_b).t().reshape(n, n, -1)
        collapsed = pre[:, :1] * streams[:, 0]
        for stream in range(1, n):
            collapsed = torch.addcmul(collapsed, pre[:, stream : stream + 1], streams[:, stream])
        hidden = rms_norm(collapsed, norm, norm_eps).to(dtype)
    return hidden, post, comb


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """The mixing matrix [N, N, R], from its logits; rows, then columns, brought to a sum of one in turn.

    In logarithms, where one step is one kernel. The epsilon in every divisor but the last is lost to the next
    division, so the result differs from transformers' by about that epsilon.
    """
    with torch.autocast(logits.device.type, enabled=False):
        logs = (logits.softmax(1) + eps).log().log_softmax(0)
        for _ in range(iterations - 1):
            logs = logs.log_softmax(1).log_softmax(0)
        return logs.exp()


def mix_back(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams [R, N, M] after a layer's function gave `output` [R, M].

    Args:
        comb: [N, N, R]; stream i goes into stream j with the weight [i, j].
    """
    with torch.autocast(streams.device.type, enabled=False):
        mixed = post.unsqueeze(-1) * output.float().unsqueeze(1)
        for stream in range(streams.shape[1]):
            mixed = torch.addcmul(mixed, comb[stream].t().unsqueeze(-1), streams[:, stream : stream + 1])
    return mixed
