"""Which file of an artifact holds which tensors. Follows from geometry, profile, length, ranks and format alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trt_redknot.artifacts.contents import LAYERS_PER_GROUP, PartSpec, artifact_parts
from trt_redknot.artifacts.formats import ArtifactFormat, TensorCodec
from trt_redknot.artifacts.tensorfile import TensorEntry, file_bytes
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile

TOKENS = "tokens"
TOKENS_FILE = "tokens.safetensors"
STREAMS_FILE = "common/streams.safetensors"


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One tensor file: `rank` is None where all ranks share it. `specs` names its parts, empty for the tokens."""

    path: str
    rank: int | None
    specs: tuple[PartSpec, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def bytes(self) -> int:
        return file_bytes(self.entries)


def tensor_name(spec: PartSpec) -> str:
    return spec.part.value if spec.layer is None else f"layers.{spec.layer}.{spec.part.value}"


def file_of(spec: PartSpec, rank: int) -> str:
    """Path of the file that holds `spec`, for the ranks' own parts that of `rank`."""
    if spec.layer is None:
        return STREAMS_FILE
    folder = f"rank-{rank:04d}" if spec.by_rank else "common"
    return f"{folder}/group-{spec.layer // LAYERS_PER_GROUP:03d}.safetensors"


def plan_files(
    geometry: ModelGeometry, profile: SplitProfile, *, tokens: int, tp_size: int, form: ArtifactFormat
) -> tuple[FilePlan, ...]:
    """Every tensor file of the artifact of a document of `tokens` tokens, without the certificate."""
    specs = artifact_parts(geometry, profile, tokens, tp_size)
    by_file: dict[tuple[str, int | None], list[PartSpec]] = {}
    for spec in specs:
        owners: tuple[int | None, ...] = tuple(range(tp_size)) if spec.by_rank else (None,)
        for owner in owners:
            by_file.setdefault((file_of(spec, owner or 0), owner), []).append(spec)
    entry = TensorEntry(name=TOKENS, dtype=torch.int64, shape=(tokens,))
    plans = [FilePlan(path=TOKENS_FILE, rank=None, specs=(), entries=(entry,))]
    for (path, rank), members in by_file.items():
        entries = tuple(_entry(spec, form, geometry) for spec in members)
        plans.append(FilePlan(path=path, rank=rank, specs=tuple(members), entries=entries))
    return tuple(plans)


def data_bytes(plans: Iterable[FilePlan]) -> int:
    """Exact bytes of the tensor files."""
    return sum(plan.bytes for plan in plans)


def _entry(spec: PartSpec, form: ArtifactFormat, geometry: ModelGeometry) -> TensorEntry:
    codec = TensorCodec.of(spec, form, geometry)
    return TensorEntry(name=tensor_name(spec), dtype=codec.stored_dtype, shape=codec.stored_shape(spec.shape))
