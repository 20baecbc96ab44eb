"""Opening a rank's part of an engine directory: device, checks, weights, and the ops that serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trt_redknot.collectives import Collectives
from trt_redknot.config.geometry import AttentionKind, ModelGeometry
from trt_redknot.engine.executor import OpsExecutor, StageExecutor
from trt_redknot.engine.manifest import MANIFEST, EngineManifest, check_files, read_manifest, weight_files
from trt_redknot.engine.tensorrt.backend import PlanBackend
from trt_redknot.engine.tensorrt.build import plan_paths
from trt_redknot.engine.tensorrt.execution import PlanExecutor
from trt_redknot.engine.tensorrt.opening import OpenedPlans, check_platform, open_plans
from trt_redknot.engine.tensorrt.platform import Platform, find_platform
from trt_redknot.engine.tensorrt.running import aligned
from trt_redknot.engine.weights import check_tensors, stored_tensors, with_experts
from trt_redknot.errors import EngineError
from trt_redknot.model.layers import Weights
from trt_redknot.ops.cuda.backend import CudaOps
from trt_redknot.ops.reference.backend import ReferenceOps

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(frozen=True, kw_only=True)
class LoadedRank:
    """One rank's part of an engine directory.

    Attributes:
        plans: of the tensorrt backend; :func:`start_plans` makes them run.
    """

    manifest: EngineManifest
    geometry: ModelGeometry
    layers: list[Weights]
    shared: Weights
    device: torch.device
    plans: OpenedPlans | None


def load_rank(directory: Path, rank: int, size: int, device: torch.device, *, verify: bool) -> LoadedRank:
    """Check the directory, then load the rank's weights onto `device`, and its plans.

    Raises:
        EngineError: another number of ranks, another machine, files that are missing, altered, or not of the engine's
            geometry; before anything loads wherever it can be known before.
    """
    manifest, geometry = read_manifest(directory)
    if manifest.tp_size != size:
        raise EngineError(
            "the engine was built for another number of ranks", expected=manifest.tp_size, found=size, path=directory,
            remedy=f"Start it with mpirun -n {manifest.tp_size} python -m mpi4py ... (in Python: comm=MPI.COMM_WORLD), "
            f"or build an engine with --tp {size}.",
        )  # fmt: skip
    by_plans = manifest.backend == "tensorrt"
    platform = _platform(manifest, device, directory) if by_plans else None
    files = manifest.ranks[rank].files
    needed = weight_files(rank, geometry.layers)
    plans = plan_paths(geometry, size) if by_plans else ()
    if tuple(file.path for file in files) != (*needed, *plans):
        raise EngineError(
            f"manifest key 'ranks.{rank}.files' does not list what the rank loads", expected=[*needed, *plans],
            found=[file.path for file in files], path=directory / MANIFEST, remedy="Build the engine again.",
        )  # fmt: skip
    check_files(directory, (*files, *manifest.tokenizer_files), digests=verify)
    loaded = []
    for layer, name in zip([*range(geometry.layers), None], needed, strict=True):
        loaded.append(_load(directory / name, device))
        wanted = stored_tensors(
            geometry, layer, rank, size, manifest.torch_dtype, fp8_experts=manifest.experts == "fp8"
        )
        check_tensors(loaded[-1], wanted, directory / name)
        if by_plans:
            # Plans are bound by address, and not every address will do.
            loaded[-1] = {name: aligned(tensor) for name, tensor in loaded[-1].items()}
    *layers, shared = loaded
    # Checked with the weights: once is enough.
    opened = None if platform is None else open_plans(directory, platform, verify=False)
    return LoadedRank(
        manifest=manifest, geometry=geometry, layers=list(layers), shared=shared, device=device, plans=opened
    )


def default_device(directory: Path) -> str:
    """Where an engine runs that nobody gave a device for: its plans on a GPU, ops on the CPU. An engine that cannot be
    read, or plans without a GPU, are refused when they are loaded."""
    try:
        manifest, _ = read_manifest(directory)
    except EngineError:
        return "cpu"
    return "cuda" if manifest.backend == "tensorrt" and torch.cuda.is_available() else "cpu"


def _platform(manifest: EngineManifest, device: torch.device, directory: Path) -> Platform:
    """The machine's TensorRT, when it is the one that the engine was built with."""
    if device.type != "cuda":
        raise EngineError(
            "the engine's plans run on a GPU", expected="device cuda or cuda:N", found=str(device), path=directory,
            remedy="Open it on a machine with the GPU it was built for, or build one with --backend torch.",
        )  # fmt: skip
    platform = find_platform(device.index or 0)
    check_platform(manifest, platform, directory / MANIFEST)
    return platform


def find_device(name: str, comm: Intracomm | None) -> torch.device:
    """The device called `name`. Plain "cuda" is the GPU of the rank's number among the ranks of its host. Collective.

    Raises:
        EngineError: there is none.
    """
    local_rank = 0 if comm is None else _local_rank(comm)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError("there is no such device", expected="cpu, cuda or cuda:N", found=name) from error
    if name == "cuda":
        device = torch.device("cuda", local_rank)
    if device.type not in ("cpu", "cuda"):
        raise EngineError("engines do not run on this device", expected="cpu, cuda or cuda:N", found=name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            "there is no such GPU",
            expected=f"one of the GPUs that torch sees, of which there are {torch.cuda.device_count() or 'none'}",
            found=str(device),
            remedy="python -m trt_redknot doctor says what is missing; the torch backend runs on the cpu, too.",
        )
    return device


def _local_rank(comm: Intracomm) -> int:
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return host.Get_rank()
    finally:
        host.Free()


def ops_for(
    device: torch.device, manifest: EngineManifest, geometry: ModelGeometry, collectives: Collectives
) -> ReferenceOps:
    """The kernels compute in bfloat16; other engines run the references, on whatever device."""
    if device.type == "cuda" and manifest.dtype == "bfloat16":
        return CudaOps(collectives, geometry)
    return ReferenceOps(collectives)


def stages_for(
    geometry: ModelGeometry,
    layers: list[Weights],
    shared: Weights,
    ropes: Mapping[AttentionKind, torch.Tensor],
    ops: ReferenceOps,
    plans: PlanBackend | None,
) -> StageExecutor:
    """Who computes the stages: the plans of the engine, or the ops where it has none."""
    if plans is None:
        return OpsExecutor(geometry, [with_experts(layer) for layer in layers], shared, ropes, ops)
    return PlanExecutor(geometry, plans, layers, shared, ropes, ops)


def _load(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise EngineError("a file of the engine cannot be read", found=error, path=path) from error
