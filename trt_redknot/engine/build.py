"""Builds an engine directory: every rank its own part, published by one rename after all ranks succeeded."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.checkpoint import Checkpoint
from trt_redknot.collectives import Collectives
from trt_redknot.collectives.agreement import agree
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_file
from trt_redknot.engine.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    EngineFile,
    EngineManifest,
    EngineRank,
    ExpertStorage,
    PlanRecord,
    geometry_to_json,
    torch_dtype,
    weight_files,
)
from trt_redknot.engine.staging import Staging, open_staging, remove_stale
from trt_redknot.engine.weights import check_experts, quantised
from trt_redknot.errors import EngineError, RedKnotError
from trt_redknot.model.weights import split_heads
from trt_redknot.partition import even_split
from trt_redknot.version import VERSION

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_VERSIONED = ("torch", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How an engine is built.

    Attributes:
        dtype: what the ranks compute in.
        max_length: most tokens of a request, prompt and answer together; None: the checkpoint's own limit.
        chunk_rows: rows that go through a stage together; our kernels on a GPU take more where there is memory.
        experts: how expert weights are stored: "same" as the rest, or in FP8 (plans always read FP8).
    """

    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    artifact_format: ArtifactFormat = ArtifactFormat.FLOAT32
    max_length: int | None = None
    chunk_rows: int = 4096
    experts: ExpertStorage = "same"


@dataclass(frozen=True, kw_only=True)
class BackendPart:
    """What a backend adds to an engine beside the weights.

    Attributes:
        plans: what they are built for, where the backend has plans.
        versions: of what it builds with, beside the packages that every engine names.
        write: writes this rank's share of the files that all ranks load, into the staging folder; returns their paths
            relative to it.
        convert: a layer's tensors of a rank, by the names of the layer functions, as the backend stores them.
    """

    name: Literal["torch", "tensorrt"]
    versions: dict[str, str] = field(default_factory=dict)
    gpu: str | None = None
    plugin_build: str | None = None
    plans: PlanRecord | None = None
    write: Callable[[Path], list[str]] = lambda staging: []
    convert: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors


def build_torch_engine(
    checkpoint: Checkpoint,
    profile: SplitProfile,
    output: Path,
    options: BuildOptions,
    collectives: Collectives,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> EngineManifest:
    """Write an engine of the torch backend: :func:`build_engine`."""
    check_experts(checkpoint.geometry, options.experts)
    part = BackendPart(name="torch", convert=quantised if options.experts == "fp8" else lambda tensors: tensors)
    return build_engine(checkpoint, profile, output, options, collectives, part, progress=progress)


def build_engine(
    checkpoint: Checkpoint,
    profile: SplitProfile,
    output: Path,
    options: BuildOptions,
    collectives: Collectives,
    part: BackendPart,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> EngineManifest:
    """Write the engine directory `output`. Collective: every rank writes its own part, rank 0 publishes.

    Args:
        progress: told how many of the layers (and one for the rest) this rank has written.

    Raises:
        EngineError: `output` exists, cannot be written, or a rank failed; on all ranks, with nothing at `output`.
        CheckpointError: a tensor cannot be read.
    """
    staging, held = _begin(output, collectives)
    error: RedKnotError | None = None
    rank: EngineRank | None = None
    digests: dict[str, str] = {}
    tokenizer: list[EngineFile] = []
    common: list[EngineFile] = []
    try:
        try:
            rank = _write_rank(checkpoint, profile, staging, options, collectives, part, progress)
            common = [_record(staging, staging / name) for name in part.write(staging)]
            mine = even_split(len(checkpoint.content_files), collectives.size)[collectives.rank]
            digests = checkpoint.content_digests(mine)
            if collectives.rank == 0:
                tokenizer = _copy_tokenizer(checkpoint.directory, staging)
        except RedKnotError as failure:
            error = failure
        except OSError as failure:
            error = _cannot_write(failure, staging)
        record = None if rank is None else rank.model_dump(mode="json")
        reply = [record, digests, [file.model_dump() for file in tokenizer], [file.model_dump() for file in common]]
        replies = agree(collectives, reply, error)
        manifest = _manifest(checkpoint, profile, options, collectives.size, part, replies)
        agree(collectives, None, _publish(manifest, staging, output) if collectives.rank == 0 else None)
    finally:
        # Also when this rank is interrupted; the others then end with the job.
        if held is not None:
            held.remove()
    return manifest


def _begin(output: Path, collectives: Collectives) -> tuple[Path, Staging | None]:
    """A fresh folder beside `output` that all ranks write into, and rank 0's hold on it."""
    error: RedKnotError | None = None
    staging: Staging | None = None
    if collectives.rank == 0:
        if output.exists() or output.is_symlink():
            error = EngineError(
                "the output exists already", path=output, remedy="Remove it, or choose another --output."
            )
        else:
            try:
                remove_stale(output)
                staging = open_staging(output)
            except OSError as failure:
                error = _cannot_write(failure, output.parent)
    names = agree(collectives, None if staging is None else staging.path.name, error)
    return output.parent / cast("str", names[0]), staging


def _write_rank(
    checkpoint: Checkpoint,
    profile: SplitProfile,
    staging: Path,
    options: BuildOptions,
    collectives: Collectives,
    part: BackendPart,
    progress: Callable[[int], None],
) -> EngineRank:
    geometry, rank, size = checkpoint.geometry, collectives.rank, collectives.size
    # Checkpoints hold nothing wider than float32: a float64 engine widens what it loads.
    dtype = torch.float32 if options.dtype == "float64" else torch_dtype(options.dtype)
    (staging / f"rank-{rank:04d}").mkdir()
    first_group = geometry.output_groups // size * rank
    *layer_files, shared_file = weight_files(rank, geometry.layers)
    files = []
    for layer, name in enumerate(layer_files):
        tensors = checkpoint.load_layer(layer, rank, size, dtype)
        tensors = split_heads(tensors, geometry, profile, layer, first_group)
        files.append(_write(staging, staging / name, part.convert(_widened(tensors, options))))
        progress(layer + 1)
    shared = _widened(checkpoint.load_shared(rank, size, dtype), options)
    files.append(_write(staging, staging / shared_file, shared))
    progress(geometry.layers + 1)
    return EngineRank(rank=rank, files=tuple(files))


def _widened(tensors: dict[str, torch.Tensor], options: BuildOptions) -> dict[str, torch.Tensor]:
    if options.dtype != "float64":
        return tensors
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _write(root: Path, path: Path, tensors: dict[str, torch.Tensor]) -> EngineFile:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        # The library has no OSError for a disk that is full or fails.
        raise _cannot_write(error, path) from error
    return _record(root, path)


def _copy_tokenizer(source: Path, staging: Path) -> list[EngineFile]:
    """The checkpoint's tokenizer goes with the engine, so that text can be asked without the checkpoint."""
    files = []
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, staging / name)
            files.append(_record(staging, staging / name))
    return files


def _record(root: Path, path: Path) -> EngineFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return EngineFile(path=str(path.relative_to(root)), bytes=path.stat().st_size, digest=digest_file(path))


def _manifest(
    checkpoint: Checkpoint,
    profile: SplitProfile,
    options: BuildOptions,
    tp_size: int,
    part: BackendPart,
    replies: list[object],
) -> EngineManifest:
    geometry: ModelGeometry = checkpoint.geometry
    digests: dict[str, str] = {}
    ranks, tokenizer = list[EngineRank](), list[EngineFile]()
    # Each rank wrote some of them, and all ranks load all.
    common = list[EngineFile]()
    for reply in replies:
        record, some, files, shared = cast("tuple[object, dict[str, str], list[object], list[object]]", reply)
        ranks.append(EngineRank.model_validate_json(json.dumps(record)))
        digests |= some
        tokenizer += [EngineFile.model_validate(file) for file in files]
        common += [EngineFile.model_validate(file) for file in shared]
    if common:
        ranks = [rank.model_copy(update={"files": (*rank.files, *common)}) for rank in ranks]
    return EngineManifest(
        format_version=FORMAT_VERSION,
        backend=part.name,
        geometry=geometry_to_json(geometry),
        geometry_digest=geometry.digest,
        profile=profile,
        profile_digest=profile.digest,
        checkpoint_fingerprint=checkpoint.fingerprint(digests),
        dtype=options.dtype,
        experts="fp8" if part.name == "tensorrt" else options.experts,
        artifact_format=options.artifact_format,
        tp_size=tp_size,
        max_length=options.max_length or geometry.max_positions,
        chunk_rows=options.chunk_rows,
        versions={name: importlib.metadata.version(name) for name in _VERSIONED}
        | {"trt-redknot": VERSION}
        | part.versions,
        gpu=part.gpu,
        plugin_build=part.plugin_build,
        plans=part.plans,
        ranks=tuple(ranks),
        tokenizer_files=tuple(tokenizer),
    )


def _publish(manifest: EngineManifest, staging: Path, output: Path) -> RedKnotError | None:
    try:
        path = staging / MANIFEST
        with path.open("wb") as file:
            file.write(manifest.encode())
            file.flush()
            os.fsync(file.fileno())
        if output.exists():
            return EngineError(
                "the output appeared while the engine was built", path=output,
                remedy="Use it if another build made it, or choose another --output.",
            )  # fmt: skip
        staging.rename(output)
        folder = os.open(output.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as failure:
        return _cannot_write(failure, output)
    return None


def _cannot_write(error: OSError | SafetensorError, path: Path) -> EngineError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return EngineError(
        f"the engine cannot be written: {reason}", path=path,
        remedy="Check free space and permissions of the output's folder.",
    )  # fmt: skip
