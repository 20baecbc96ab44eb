"""The tensors that lie in a rank's files of an engine: names, shapes, element types. What is loaded is held to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trt_redknot.checkpoint.specs import Storage, TensorSpec, layer_specs, shared_specs
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.errors import EngineError
from trt_redknot.model.layers import Weights
from trt_redknot.ops.experts import EXPERT_BLOCK, QuantisedExperts, quantise_experts

# Ending of the name of a weight's scales.
SCALE = "_scale"
_EXPERTS = ("experts.gate_up", "experts.down")
# Axis of the heads in tensors that model/weights.py splits by role.
_HEAD_AXES = {"attn.q_b": 0, "attn.sinks": 0, "attn.o_a": 2}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of an engine file.

    Attributes:
        source: the checkpoint's name of what it is part of.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(
    geometry: ModelGeometry, layer: int | None, rank: int, size: int, dtype: torch.dtype, *, fp8_experts: bool
) -> Iterator[StoredTensor]:
    """Tensors of a layer, or (None) of a rank's file of what lies outside the layers.

    Args:
        dtype: what the engine computes in.
        fp8_experts: expert weights are e4m3 with a scale a block, as plans read them.
    """
    for spec in shared_specs(geometry) if layer is None else layer_specs(geometry, layer):
        shape, kind = spec.local_shape(rank, size), _stored_dtype(spec, dtype)
        if spec.name in _HEAD_AXES:
            axis, heads = _HEAD_AXES[spec.name], geometry.heads_per_group
            for role, count in (("global", 1), ("local", heads - 1)):
                part = (*shape[:axis], shape[axis] // heads * count, *shape[axis + 1 :])
                yield StoredTensor(name=f"{spec.name}_{role}", source=spec.name, shape=part, dtype=kind)
        elif fp8_experts and spec.storage is Storage.EXPERTS:
            experts, width, depth = shape
            blocks = (experts, depth // EXPERT_BLOCK, width // EXPERT_BLOCK)
            yield StoredTensor(name=spec.name, source=spec.name, shape=shape, dtype=torch.float8_e4m3fn)
            yield StoredTensor(name=spec.name + SCALE, source=spec.name, shape=blocks, dtype=torch.float32)
        else:
            yield StoredTensor(name=spec.name, source=spec.name, shape=shape, dtype=kind)


def check_experts(geometry: ModelGeometry, experts: str) -> None:
    """Raise EngineError where expert weights cannot be stored as `experts` says."""
    if experts == "fp8" and (geometry.hidden % EXPERT_BLOCK or geometry.expert_width % EXPERT_BLOCK):
        raise EngineError(
            "expert weights of this geometry have no FP8 blocks",
            expected=f"hidden and expert width that {EXPERT_BLOCK} divides",
            found=f"{geometry.hidden} and {geometry.expert_width}", remedy="Build with --experts same.",
        )  # fmt: skip


def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors with its expert weights in FP8, as they are stored.

    Raises:
        EngineError: an expert weight is infinite or no number, or is so in float32.
    """
    result = dict(tensors)
    for name in _EXPERTS:
        weight = quantise_experts(tensors[name])
        finite = weight.scales.isfinite().flatten(1).all(1)
        if not finite.all():
            raise EngineError(
                f"expert weights {name!r} cannot be stored in FP8", expected="finite numbers",
                found=f"an infinity or no number in {int((~finite).sum())} of {len(finite)} experts of this rank, "
                f"first in number {int(finite.int().argmin())}",
                remedy="The checkpoint is damaged, or needs --experts same.",
            )  # fmt: skip
        result[name], result[name + SCALE] = weight.codes, weight.scales
    return result


def with_experts(tensors: Weights) -> Weights:
    """A layer's tensors as ops take them: codes and scales of expert weights put together, where they are apart."""
    result = dict(tensors)
    for name in _EXPERTS:
        if name + SCALE in tensors:
            result[name] = QuantisedExperts(codes=tensors[name], scales=result.pop(name + SCALE))
    return result


def check_tensors(tensors: Mapping[str, torch.Tensor], wanted: Iterator[StoredTensor], path: Path) -> None:
    """Raise EngineError for the first tensor of a file that is missing, unknown, or not as the geometry says."""
    specified = {tensor.name: tensor for tensor in wanted}
    for name in sorted(specified.keys() | tensors.keys()):
        there, spec = tensors.get(name), specified.get(name)
        found = "nothing" if there is None else _described(tuple(there.shape), there.dtype)
        expected = "no such tensor" if spec is None else _described(spec.shape, spec.dtype)
        if found != expected:
            raise EngineError(
                f"tensor {name!r} of an engine file is not what the engine's geometry says", expected=expected,
                found=found, path=path, remedy="Build the engine again with build_engine.py.",
            )  # fmt: skip


def _stored_dtype(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    loaded = spec.loaded_dtype(dtype)
    # A float64 engine widens what it loads, for nothing else to decide near ties.
    return torch.float64 if dtype is torch.float64 and loaded.is_floating_point else loaded


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
