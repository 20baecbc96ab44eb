"""How many rows go through a stage together, where nobody said: as many as the device has memory for, up to a point.

Few large chunks read every weight less often and leave the host less to do; past the point they win nothing more.
"""

from __future__ import annotations

import torch

from trt_redknot.collectives import Collectives
from trt_redknot.collectives.agreement import agree
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.engine.loading import LoadedRank
from trt_redknot.engine.pool import raw_widths
from trt_redknot.errors import EngineError
from trt_redknot.reports.footprint import estimate

# A product of so many rows a group is bound by arithmetic, also where each expert gets few of them.
MOST_ROWS = 32768
_STEP = 256
# Of the memory that is left, what a chunk's temporaries may take. The rest is for artifacts and for the allocator.
_SHARE = 0.25
# Residual streams that are held at a time: a layer's input, its output, and a copy while rows change owners.
_STREAMS_HELD = 3
# Raw compressor rows of a layer: as they were gathered, and joined.
_RAW_HELD = 2


def raw_row_bytes(geometry: ModelGeometry, itemsize: int) -> int:
    """Bytes of one token's raw compressor rows, in the layer that has most of them."""
    return max(sum(raw_widths(geometry, layer)) for layer in range(geometry.layers)) * itemsize


def chunk_row_bytes(geometry: ModelGeometry, tp_size: int, itemsize: int) -> int:
    """Temporary bytes on a rank for each row of a chunk, at worst: every expert that a row chose is on this rank.

    Args:
        itemsize: bytes of an activation.
    """
    g = geometry
    heads = -(-g.heads // tp_size)
    attention = g.q_lora_rank + 3 * heads * g.head_dim + 3 * -(-g.projected // tp_size) + 2 * g.hidden
    routed = max(g.hidden + 2 * g.expert_width, 3 * g.expert_width, 2 * g.hidden + g.expert_width)
    ffn = 4 * g.hidden + g.experts_per_token * routed
    return max(attention, ffn) * itemsize


def choose_chunk_rows(
    geometry: ModelGeometry,
    profile: SplitProfile,
    *,
    tp_size: int,
    length: int,
    free_bytes: int,
    least: int,
    dtype: torch.dtype,
) -> int:
    """Rows of a chunk on a device with `free_bytes` left once the weights are loaded.

    Args:
        length: tokens of the longest request.
        least: what is returned where memory is short.
    """
    runtime = estimate(geometry, profile, tp_size=tp_size, length=length, activation_dtype=dtype).runtime
    caches = runtime.latents + runtime.entries + runtime.index_keys + _STREAMS_HELD * runtime.streams
    caches += _RAW_HELD * length * raw_row_bytes(geometry, dtype.itemsize)
    room = int((free_bytes - caches) * _SHARE) // chunk_row_bytes(geometry, tp_size, dtype.itemsize)
    return max(least, min(MOST_ROWS, room // _STEP * _STEP))


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may still take: what the driver has, and what torch holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def agreed_chunk_rows(loaded: LoadedRank, collectives: Collectives, asked: int | None) -> int:
    """Rows of a chunk, the same on every rank. Collective.

    Raises:
        EngineError: less than one row was asked for, or other rows than the plans were built for.
    """
    built, manifest = loaded.manifest.chunk_rows, loaded.manifest
    failure = None
    if asked is not None and (asked < 1 or (loaded.plans is not None and asked > built)):
        failure = EngineError(
            "the engine cannot take chunks of so many rows",
            expected="at least 1" if loaded.plans is None else f"1 to {built}, which its plans were built for",
            found=asked, remedy="Leave chunk_rows out, or build the engine with another --chunk-rows.",
        )  # fmt: skip
    rows = asked or built
    # The references hold far more of a chunk at a time than our kernels, which compute in bfloat16.
    by_kernels = loaded.plans is None and loaded.device.type == "cuda" and manifest.dtype == "bfloat16"
    if failure is None and asked is None and by_kernels:
        rows = choose_chunk_rows(
            loaded.geometry, manifest.profile, tp_size=collectives.size, length=manifest.max_length,
            free_bytes=free_memory(loaded.device), least=built, dtype=manifest.torch_dtype,
        )  # fmt: skip
    return min(int(str(each)) for each in agree(collectives, rows, failure))
