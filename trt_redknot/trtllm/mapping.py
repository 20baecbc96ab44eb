"""`tensorrt_llm.Mapping` as the place of a rank. Anything with the same attributes will do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trt_redknot.checkpoint.specs import check_parallelism
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.engine import Engine
from trt_redknot.errors import EngineError
from trt_redknot.partition import even_split

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class MappingLike(Protocol):
    """The attributes of `tensorrt_llm.Mapping` that say where a rank stands.

    Releases differ in the rest: moe_cluster_size, enable_attention_dp and auto_parallel are read where they exist.
    """

    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def cp_size(self) -> int: ...
    @property
    def moe_tp_size(self) -> int: ...
    @property
    def moe_ep_size(self) -> int: ...
    @property
    def moe_ep_rank(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank as an engine sees it.

    Attributes:
        experts: ids of the experts that it holds, at their full width.
        groups: its output groups, with all their heads.
    """

    rank: int
    size: int
    experts: range
    groups: range


def rank_place(mapping: MappingLike, geometry: ModelGeometry) -> RankPlace:
    """What a rank of this mapping holds of a network.

    Raises:
        EngineError: pipeline, context or data parallelism, experts that are cut across ranks, or a number of ranks that
            the network cannot be spread over; with the value that the mapping has.
    """
    size = mapping.tp_size
    for name, found, wanted, reason in (
        ("pp_size", mapping.pp_size, 1, "every rank runs all layers"),
        ("cp_size", mapping.cp_size, 1, "rows are spread over the tensor-parallel ranks"),
        ("moe_cluster_size", getattr(mapping, "moe_cluster_size", 1), 1, "experts are spread over all ranks alike"),
        ("moe_tp_size", mapping.moe_tp_size, 1, "experts are whole"),
        ("moe_ep_size", mapping.moe_ep_size, size, "experts are spread over the tensor-parallel ranks"),
        ("world_size", mapping.world_size, size, "every rank is a tensor-parallel rank"),
        ("enable_attention_dp", getattr(mapping, "enable_attention_dp", False), False, "heads are spread over ranks"),
        ("auto_parallel", getattr(mapping, "auto_parallel", False), False, "the layout of an engine is fixed"),
    ):
        if found != wanted:
            raise EngineError(
                f"an engine cannot be spread as the mapping says: {reason}", expected=f"{name} {wanted}",
                found=f"{name} {found}",
                remedy=f"Use Mapping(world_size={size}, tp_size={size}, moe_ep_size={size}, rank=...).",
            )  # fmt: skip
    if not 0 <= mapping.tp_rank < size:
        raise EngineError("the mapping's rank is none of its ranks", expected=f"0 to {size - 1}", found=mapping.tp_rank)
    if mapping.moe_ep_rank != mapping.tp_rank:
        raise EngineError(
            "the mapping gives a rank other experts than heads", expected=f"moe_ep_rank {mapping.tp_rank}",
            found=f"moe_ep_rank {mapping.moe_ep_rank}",
        )  # fmt: skip
    check_parallelism(geometry, mapping.tp_rank, size)
    return RankPlace(
        rank=mapping.tp_rank,
        size=size,
        experts=even_split(geometry.experts, size)[mapping.tp_rank],
        groups=even_split(geometry.output_groups, size)[mapping.tp_rank],
    )


def open_engine(
    engine_dir: Path | str, mapping: MappingLike, comm: Intracomm | None = None, *, verify: bool = True,
    device: str | None = None,
) -> Engine:  # fmt: skip
    """Open an engine as the rank that a mapping says. Collective; arguments as :meth:`Engine.open`.

    Raises:
        EngineError: the communicator has other ranks than the mapping, or as `Engine.open` and `rank_place`.
    """
    stands = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    if stands != (mapping.tp_rank, mapping.tp_size):
        raise EngineError(
            "the communicator has other ranks than the mapping",
            expected=f"rank {mapping.tp_rank} of {mapping.tp_size}", found=f"rank {stands[0]} of {stands[1]}",
        )  # fmt: skip
    engine = Engine.open(engine_dir, comm, verify=verify, device=device)
    rank_place(mapping, engine.geometry)
    return engine
