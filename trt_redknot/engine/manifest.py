"""engine.json: what an engine directory is, checked before anything of it loads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.geometry import AttentionKind, ModelGeometry, RopeGeometry, RouterKind
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_file
from trt_redknot.errors import EngineError

MANIFEST = "engine.json"
FORMAT_VERSION = 1
_MANIFEST_LIMIT = 64 * 2**20

# float64 is for verification: rounding then decides no near tie of a router or of the Indexer.
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineFile(_Strict):
    """One file of the engine directory, by path relative to it."""

    path: str
    bytes: int = Field(ge=0)
    digest: str


class EngineRank(_Strict):
    """What one rank loads."""

    rank: int = Field(ge=0)
    files: tuple[EngineFile, ...]


class EngineManifest(_Strict):
    """Content of engine.json.

    Attributes:
        geometry: the fields of :class:`ModelGeometry`; `geometry_digest` must be theirs.
        max_length: most tokens of a request, prompt and answer together.
        chunk_rows: rows that go through a stage together.
        versions: of the packages that built the engine.
        gpu, plugin_build: None for engines that need neither.
    """

    format_version: Literal[1]
    backend: Literal["torch", "tensorrt"]
    geometry: dict[str, object]
    geometry_digest: str
    profile: SplitProfile
    profile_digest: str
    checkpoint_fingerprint: str
    dtype: Literal["float64", "float32", "bfloat16"]
    artifact_format: ArtifactFormat
    tp_size: int = Field(ge=1)
    max_length: int = Field(ge=1)
    chunk_rows: int = Field(ge=1)
    versions: dict[str, str]
    gpu: str | None
    plugin_build: str | None
    ranks: tuple[EngineRank, ...]
    tokenizer_files: tuple[EngineFile, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def encode(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def geometry_to_json(geometry: ModelGeometry) -> dict[str, object]:
    data: dict[str, object] = json.loads(json.dumps(asdict(geometry)))
    return data


def geometry_from_json(data: dict[str, object], path: Path) -> ModelGeometry:
    """Raises EngineError where the fields are not those of a geometry."""
    try:
        fields = dict(data)
        for name in ("rope_sliding", "rope_compressed"):
            fields[name] = RopeGeometry(**fields[name])  # type: ignore[arg-type]
        fields["attention_kinds"] = tuple(AttentionKind(kind) for kind in fields["attention_kinds"])  # type: ignore[attr-defined]
        fields["router_kinds"] = tuple(RouterKind(kind) for kind in fields["router_kinds"])  # type: ignore[attr-defined]
        fields["stop_tokens"] = tuple(fields["stop_tokens"])  # type: ignore[arg-type]
        return ModelGeometry(**fields)  # type: ignore[arg-type]
    except (TypeError, ValueError, KeyError) as error:
        raise EngineError("the manifest's geometry is ill-formed", found=error, path=path, remedy=_REBUILD) from error


_REBUILD = "Build the engine again with build_engine.py."


def read_manifest(directory: Path) -> tuple[EngineManifest, ModelGeometry]:
    """The manifest of an engine directory and its geometry.

    Raises:
        EngineError: no directory, no manifest, of another version, altered, or self-contradictory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise EngineError("this is not an engine directory", expected=MANIFEST, path=directory, remedy=_REBUILD)
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise EngineError("the manifest is too large", found=f"{path.stat().st_size} bytes", path=path)
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise EngineError("the manifest cannot be read", found=error, path=path, remedy=_REBUILD) from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise EngineError(
            "the manifest has another format version", expected=FORMAT_VERSION, found=version, path=path, remedy=_REBUILD
        )
    try:
        # JSON mode: the profile is strict, and in JSON a tuple is a list and a key a string.
        manifest = EngineManifest.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise EngineError(
            f"manifest key {key!r} is wrong: {first['msg']}", path=path, remedy=_REBUILD
        ) from error
    geometry = geometry_from_json(manifest.geometry, path)
    for name, stated, actual in (
        ("geometry_digest", manifest.geometry_digest, geometry.digest),
        ("profile_digest", manifest.profile_digest, manifest.profile.digest),
        ("ranks", [rank.rank for rank in manifest.ranks], list(range(manifest.tp_size))),
    ):
        if stated != actual:
            raise EngineError(f"manifest key {name!r} contradicts the rest", expected=actual, found=stated, path=path)
    manifest.profile.check(geometry)
    return manifest, geometry


def check_files(directory: Path, files: tuple[EngineFile, ...], *, digests: bool) -> None:
    """Raise EngineError for the first file that is missing, of another size, or (if asked) of other content."""
    root = directory.resolve()
    for file in files:
        path = directory / file.path
        if not path.resolve().is_relative_to(root):
            raise EngineError("the manifest names a file outside the engine directory", found=file.path, path=directory)
        if not path.is_file():
            raise EngineError("a file of the engine is missing", path=path, remedy=_REBUILD)
        size = path.stat().st_size
        if size != file.bytes:
            raise EngineError(
                "a file of the engine has another size", expected=file.bytes, found=size, path=path, remedy=_REBUILD
            )
        if digests and digest_file(path) != file.digest:
            raise EngineError(
                "a file of the engine has other content than when it was built", expected=file.digest,
                found=digest_file(path), path=path, remedy=_REBUILD,
            )  # fmt: skip
