"""Whether weights and one request have room in the memory of a GPU, and from how many ranks on they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.reports.footprint import Estimate, WeightDtype, runtime_bytes, weight_bytes

# What CUDA calls the memory of an H200, rounded down.
H200_BYTES = 139 << 30
_EXPERTS = "routed experts"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One way to build the engine against the memory of a GPU.

    Attributes:
        dtype: what the ranks compute in.
        experts: ``same`` or ``fp8``, as `build_engine.py --experts`.
        weights, request: bytes of a rank: all weights, and caches and activations of one request. A lower bound: an
            executor, and artifacts that are read ahead, take more.
        memory: bytes of the GPU.
        smallest: ranks from which on it fits; None: not with any number that the network can be split over.
    """

    dtype: str
    experts: str
    weights: int
    request: int
    memory: int
    smallest: int | None

    @property
    def total(self) -> int:
        return self.weights + self.request

    @property
    def fits(self) -> bool:
        return self.total <= self.memory

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"total": self.total, "fits": self.fits}


def find_memory() -> tuple[int, str]:
    """Bytes of this machine's first GPU and its name; those of an H200 where there is none."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return int(found.total_memory), str(found.name)
    return H200_BYTES, "H200"


def fits_of(geometry: ModelGeometry, result: Estimate, *, dtype: str, experts: str, memory: int) -> list[Fit]:
    """The engine that was asked for (`dtype`, `experts`), then the other ways to build it for a GPU.

    Args:
        result: the estimate of the ranks that were asked for.
        memory: bytes of a GPU.
    """
    groups = geometry.output_groups
    weights = {ranks: weight_bytes(geometry, ranks) for ranks in range(1, groups + 1) if groups % ranks == 0}
    fits = []
    for way in dict.fromkeys([(dtype, experts), ("bfloat16", "same"), ("bfloat16", "fp8")]):
        needed = {
            ranks: (_held(by_class, *way), _request(geometry, result, ranks, way[0]))
            for ranks, by_class in weights.items()
        }
        smallest = next((ranks for ranks, both in needed.items() if sum(both) <= memory), None)
        held, request = needed[result.tp_size]
        fits.append(Fit(dtype=way[0], experts=way[1], weights=held, request=request, memory=memory, smallest=smallest))
    return fits


def _held(weights: Mapping[str, Mapping[str, int]], dtype: str, experts: str) -> int:
    # float64 is held as what was loaded in float32, widened.
    column, factor = (WeightDtype.FLOAT32, 2) if dtype == "float64" else (WeightDtype(dtype), 1)
    total = factor * sum(by_dtype[column] for by_dtype in weights.values())
    if experts == "fp8":
        total += weights[_EXPERTS][WeightDtype.FP8] - factor * weights[_EXPERTS][column]
    return total


def _request(geometry: ModelGeometry, result: Estimate, ranks: int, dtype: str) -> int:
    chunk = min(result.chunk_rows, result.length)
    return runtime_bytes(geometry, ranks, result.length, chunk, getattr(torch, dtype)).total
