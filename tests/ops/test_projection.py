"""The split of W_a by head role is exact, and restoration replaces instead of adding."""

from __future__ import annotations

import dataclasses
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.model.weights import split_heads
from trt_redknot.ops.reference.projection import grouped_linear, restore_replace


@settings(max_examples=25, deadline=None)
@given(groups=st.integers(1, 4), heads=st.integers(1, 8), ranks=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**31))
def test_split_of_w_a_is_exact(groups: int, heads: int, ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    groups *= ranks
    geometry = dataclasses.replace(
        released_geometry("flash"), heads=groups * heads, output_groups=groups, head_dim=6, output_lora_rank=5,
        q_lora_rank=3,
    )  # fmt: skip
    layer = 20
    chosen = tuple(draw.randrange(heads) for _ in range(groups))
    profile = SplitProfile.default(geometry).model_copy(update={"global_heads": {layer: chosen}})
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    o_a, q_b, sinks = normal(groups, 5, heads * 6), normal(groups * heads * 6, 3), normal(groups * heads)
    x, output = normal(7, 3), normal(7, groups * heads, 6)
    whole = grouped_linear(output, o_a)
    share = groups // ranks
    for rank in range(ranks):
        mine = slice(rank * share, (rank + 1) * share)
        rows = slice(rank * share * heads * 6, (rank + 1) * share * heads * 6)
        split = split_heads(
            {
                "attn.q_b": q_b[rows],
                "attn.sinks": sinks[rank * share * heads : (rank + 1) * share * heads],
                "attn.o_a": o_a[mine],
            },
            geometry, profile, layer, rank * share,
        )  # fmt: skip
        own = output[:, rank * share * heads : (rank + 1) * share * heads].view(7, share, heads, 6)
        picked = torch.zeros(share, heads, dtype=torch.bool)
        picked[range(share), list(chosen[mine])] = True
        global_heads, local_heads = own[:, picked], own[:, ~picked]
        z = grouped_linear(global_heads, split["attn.o_a_global"])
        z = z + grouped_linear(local_heads, split["attn.o_a_local"])
        torch.testing.assert_close(z, whole[:, rank * share * 5 : (rank + 1) * share * 5], atol=1e-12, rtol=1e-12)
        q = (x @ q_b[rows].T).view(7, share, heads, 6)
        torch.testing.assert_close((x @ split["attn.q_b_global"].T).view(7, share, 6), q[:, picked])
        torch.testing.assert_close((x @ split["attn.q_b_local"].T).view(7, share * (heads - 1), 6), q[:, ~picked])
        assert torch.equal(split["attn.sinks_global"], sinks.view(ranks, share, heads)[rank][picked])


def test_restoration_replaces_and_never_adds() -> None:
    z_global, online, cached = torch.randn(5, 4), torch.randn(3, 4), torch.randn(2, 4)
    state = restore_replace(z_global, online, cached)
    assert torch.equal(state[:3], z_global[:3] + online)
    assert torch.equal(state[3:], z_global[3:] + cached)
