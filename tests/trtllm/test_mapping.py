"""A mapping of TensorRT-LLM as the place of a rank.

`Mapping` below has what tensorrt_llm/mapping.py of NVIDIA/TensorRT-LLM (public; read at commit 05ebebb2) says of the
real class: its arguments, what it fills in, tp_rank = rank % tp_size, moe_ep_rank = tp_rank % moe_ep_size, ep_experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.networks import NetworkOptions, build_engine, network, write_network
from tests.support.plans import geometry, nano_geometry
from trt_redknot import Request, Tokens
from trt_redknot.errors import EngineError, RedKnotError
from trt_redknot.trtllm.mapping import open_engine, rank_place


@dataclass(kw_only=True)
class Mapping:
    """The public attributes of `tensorrt_llm.Mapping`."""

    world_size: int = 1
    rank: int = 0
    cp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    moe_cluster_size: int = -1
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    enable_attention_dp: bool = False
    auto_parallel: bool = False

    def __post_init__(self) -> None:
        self.moe_cluster_size = max(self.moe_cluster_size, 1)
        if self.moe_tp_size == -1 and self.moe_ep_size == -1:
            self.moe_tp_size, self.moe_ep_size = self.tp_size // self.moe_cluster_size, 1
        elif self.moe_tp_size == -1:
            self.moe_tp_size = self.tp_size // (self.moe_ep_size * self.moe_cluster_size)
        elif self.moe_ep_size == -1:
            self.moe_ep_size = self.tp_size // (self.moe_tp_size * self.moe_cluster_size)
        assert self.tp_size * self.pp_size * self.cp_size == self.world_size
        assert self.moe_tp_size * self.moe_ep_size * self.moe_cluster_size == self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    def ep_experts(self, experts: int) -> list[int]:
        share = experts // self.moe_ep_size
        return list(range(self.moe_ep_rank * share, (self.moe_ep_rank + 1) * share))


@given(name=st.sampled_from(["flash", "pro"]), size=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_a_rank_holds_the_experts_that_the_mapping_gives_it(name: str, size: int, data: st.DataObject) -> None:
    g, rank = geometry(name), data.draw(st.integers(0, size - 1))
    mapping = Mapping(world_size=size, tp_size=size, moe_ep_size=size, rank=rank)
    place = rank_place(mapping, g)
    assert (place.rank, place.size) == (rank, size)
    assert list(place.experts) == mapping.ep_experts(g.experts)
    assert len(place.groups) * size == g.output_groups
    assert place.groups.start == rank * g.output_groups // size


@pytest.mark.parametrize(
    ("mapping", "expected", "found"),
    [
        (Mapping(world_size=4, tp_size=2, pp_size=2, moe_ep_size=2), "pp_size 1", "pp_size 2"),
        (Mapping(world_size=4, tp_size=2, cp_size=2), "cp_size 1", "cp_size 2"),
        (Mapping(world_size=2, tp_size=2), "moe_tp_size 1", "moe_tp_size 2"),
        (Mapping(world_size=4, tp_size=4, moe_ep_size=2), "moe_tp_size 1", "moe_tp_size 2"),
        (Mapping(world_size=2, tp_size=2, moe_cluster_size=2), "moe_cluster_size 1", "moe_cluster_size 2"),
        (
            Mapping(world_size=2, tp_size=2, moe_ep_size=2, enable_attention_dp=True),
            "enable_attention_dp False", "enable_attention_dp True",
        ),
        (Mapping(auto_parallel=True), "auto_parallel False", "auto_parallel True"),
    ],
)  # fmt: skip
def test_other_ways_to_spread_a_network_are_refused_with_both_values(
    mapping: Mapping, expected: str, found: str
) -> None:
    with pytest.raises(EngineError, match="an engine cannot be spread as the mapping says") as caught:
        rank_place(mapping, nano_geometry())
    assert (caught.value.expected, caught.value.found) == (expected, found)
    assert "moe_ep_size=" in (caught.value.remedy or "")


def test_ranks_that_the_network_cannot_be_spread_over_are_refused() -> None:
    with pytest.raises(RedKnotError, match="3"):
        rank_place(Mapping(world_size=3, tp_size=3, moe_ep_size=3), nano_geometry())


def test_an_engine_opens_as_the_rank_of_a_mapping(tmp_path: Path) -> None:
    checkpoint = write_network(network(NetworkOptions(kinds="sch")), tmp_path / "checkpoint")
    directory = build_engine(checkpoint, tmp_path / "engine")
    engine = open_engine(directory, Mapping())
    response = engine.generate(Request(segments=[Tokens([1, 2, 3])], max_new_tokens=2))
    assert len(response.tokens) in (1, 2)
    with pytest.raises(EngineError, match="other ranks than the mapping, expected rank 1 of 2, found rank 0 of 1"):
        open_engine(directory, Mapping(world_size=2, tp_size=2, moe_ep_size=2, rank=1))
    comm: Any = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2)
    with pytest.raises(EngineError, match="expected rank 0 of 2, found rank 1 of 2"):
        open_engine(directory, Mapping(world_size=2, tp_size=2, moe_ep_size=2), comm)
