"""A rank's weights under the names the layer functions use: the checkpoint's canonical names, attention split by
head role."""

from __future__ import annotations

import torch

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile


def split_heads(
    tensors: dict[str, torch.Tensor], geometry: ModelGeometry, profile: SplitProfile, layer: int, first_group: int
) -> dict[str, torch.Tensor]:
    """Replace q_b, sinks and o_a of a layer by their Global and Local parts.

    Args:
        tensors: the rank's slice of the layer, canonical names; attn.q_b [Gr * h * D, Q], attn.sinks [Gr * h],
            attn.o_a [Gr, C, h * D] for the Gr output groups of the rank.
        first_group: first of those groups.

    Slicing W_a by head columns is exact: the sum over heads is only split in two.
    """
    heads, dim = geometry.heads_per_group, geometry.head_dim
    result = dict(tensors)
    q_b, sinks, o_a = result.pop("attn.q_b"), result.pop("attn.sinks"), result.pop("attn.o_a")
    groups = o_a.shape[0]
    chosen = torch.tensor([profile.global_head(layer, first_group + group) for group in range(groups)])
    is_global = torch.zeros(groups, heads, dtype=torch.bool)
    is_global[torch.arange(groups), chosen] = True
    q_b = q_b.view(groups, heads, dim, -1)
    o_a = o_a.view(groups, -1, heads, dim).transpose(1, 2)
    for role, mask in (("global", is_global), ("local", ~is_global)):
        count = 1 if role == "global" else heads - 1
        result[f"attn.q_b_{role}"] = q_b[mask].reshape(groups * count * dim, q_b.shape[-1]).contiguous()
        result[f"attn.sinks_{role}"] = sinks.view(groups, heads)[mask].contiguous()
        part = o_a[mask].view(groups, count, o_a.shape[2], dim).transpose(1, 2)
        result[f"attn.o_a_{role}"] = part.reshape(groups, o_a.shape[2], count * dim).contiguous()
    return result
