"""How many layers of a network fit a rank's memory, where a bench takes as many as do."""

from __future__ import annotations

import dataclasses

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.manifest import ExpertStorage
from trt_redknot.errors import EngineError
from trt_redknot.reports.footprint import WeightDtype, estimate

# Of the memory that is free, for weights and caches; documents, chunks of rows and the allocator take the rest.
_SHARE = 0.7
# Both fences, and a layer between them.
LEAST_LAYERS = 7


def first_layers(geometry: ModelGeometry, count: int) -> ModelGeometry:
    """The network cut off after so many layers; the last three of those are its trailing fence."""
    return dataclasses.replace(
        geometry, attention_kinds=geometry.attention_kinds[:count], router_kinds=geometry.router_kinds[:count]
    )


def layers_that_fit(
    geometry: ModelGeometry, *, tp_size: int, length: int, experts: ExpertStorage, free_bytes: int
) -> int:
    """Layers whose weights (bf16, experts as `experts` says) and caches of one request fit a rank of `tp_size`.

    Raises:
        EngineError: the fences and a layer between them do not.
    """
    room = int(free_bytes * _SHARE)
    for count in range(geometry.layers, LEAST_LAYERS - 1, -1):
        needed = _bytes(first_layers(geometry, count), tp_size, length, experts)
        if needed <= room:
            return count
    raise EngineError(
        f"the fences and a layer between them do not fit a rank of {tp_size}", expected=f"at least {needed} bytes",
        found=f"{room} bytes for weights and caches, of {free_bytes} that are free",
        remedy="Take more ranks (--tp), a shorter --length, or --experts fp8.",
    )  # fmt: skip


def _bytes(geometry: ModelGeometry, tp_size: int, length: int, experts: ExpertStorage) -> int:
    found = estimate(geometry, SplitProfile.default(geometry), tp_size=tp_size, length=length)
    dtypes = {"routed experts": WeightDtype.FP8} if experts == "fp8" else {}
    weights = sum(sizes[dtypes.get(kind, WeightDtype.BFLOAT16)] for kind, sizes in found.weights.items())
    return weights + found.runtime.latents + found.runtime.entries + found.runtime.index_keys
