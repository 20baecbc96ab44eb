"""Opening a rank's part of an engine directory: device, checks, weights, and the ops that serve them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.engine.manifest import MANIFEST, EngineManifest, check_files, read_manifest, weight_files
from trt_redknot.errors import EngineError
from trt_redknot.model.layers import Weights
from trt_redknot.ops.cuda.backend import CudaOps
from trt_redknot.ops.reference.backend import ReferenceOps


@dataclass(frozen=True, kw_only=True)
class LoadedRank:
    """One rank's part of an engine directory."""

    manifest: EngineManifest
    geometry: ModelGeometry
    layers: list[Weights]
    shared: Weights
    device: torch.device


def load_rank(directory: Path, rank: int, size: int, device: torch.device, *, verify: bool) -> LoadedRank:
    """Check the directory, then load the rank's weights onto `device`. Raises EngineError before anything loads."""
    manifest, geometry = read_manifest(directory)
    if manifest.tp_size != size:
        raise EngineError(
            "the engine was built for another number of ranks", expected=manifest.tp_size, found=size, path=directory,
            remedy=f"Start it with mpirun -n {manifest.tp_size} and hand in MPI.COMM_WORLD, or build it with --tp "
            f"{size}.",
        )  # fmt: skip
    if manifest.backend != "torch":
        raise EngineError(
            "this version answers no requests with TensorRT plans", expected="backend torch", found=manifest.backend,
            path=directory, remedy="Build one with build_engine.py --backend torch.",
        )  # fmt: skip
    files = manifest.ranks[rank].files
    needed = weight_files(rank, geometry.layers)
    if tuple(file.path for file in files) != needed:
        raise EngineError(
            f"manifest key 'ranks.{rank}.files' does not list what the rank loads", expected=list(needed),
            found=[file.path for file in files], path=directory / MANIFEST, remedy="Build the engine again.",
        )  # fmt: skip
    check_files(directory, (*files, *manifest.tokenizer_files), digests=verify)
    *layers, shared = (_load(directory / name, device) for name in needed)
    return LoadedRank(manifest=manifest, geometry=geometry, layers=list(layers), shared=shared, device=device)


def find_device(name: str) -> torch.device:
    """The device called `name`. Raises EngineError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError("there is no such device", expected="cpu, cuda or cuda:N", found=name) from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError("engines do not run on this device", expected="cpu, cuda or cuda:N", found=name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            "there is no such GPU",
            expected=f"one of the {torch.cuda.device_count()} that torch sees",
            found=name,
            remedy="python -m trt_redknot doctor says what is missing; device cpu always works.",
        )
    return device


def ops_for(
    device: torch.device, manifest: EngineManifest, geometry: ModelGeometry, collectives: Collectives
) -> ReferenceOps:
    """The kernels compute in bfloat16; other engines run the references, on whatever device."""
    if device.type == "cuda" and manifest.dtype == "bfloat16":
        return CudaOps(collectives, geometry)
    return ReferenceOps(collectives)


def _load(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise EngineError("a file of the engine cannot be read", found=error, path=path) from error
