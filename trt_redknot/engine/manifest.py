"""engine.json: what an engine directory is, checked before anything of it loads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.artifacts.identity import ArtifactIdentity
from trt_redknot.config.documents import read_json_object, validated_json
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_file, digest_json
from trt_redknot.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import torch

MANIFEST = "engine.json"
FORMAT_VERSION = 2
_MANIFEST_LIMIT = 64 * 2**20

# Plain names below the engine directory: no leading slash, no "..", no hidden file.
_INSIDE = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$"
_REBUILD = "Build the engine again with build_engine.py."

# float64 is for verification: rounding then decides no near tie of a router or of the Indexer.
ExpertStorage = Literal["same", "fp8"]


def torch_dtype(name: Literal["float64", "float32", "bfloat16"]) -> torch.dtype:
    """What torch calls an engine's dtype. Whoever only reads a manifest does not wait for torch."""
    import torch

    return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineFile(_Strict):
    """One file of the engine directory, by path relative to it."""

    path: str = Field(pattern=_INSIDE, max_length=256)
    bytes: int = Field(ge=0)
    digest: str


class EngineRank(_Strict):
    """What one rank loads."""

    rank: int = Field(ge=0)
    files: tuple[EngineFile, ...]


class PlanRecord(_Strict):
    """What the plans of an engine were built for.

    Attributes:
        decode_rows, segments, pool_tokens: limits beside those of the engine (:class:`PlanLimits`).
        packed_cache, packed_local: caches are packed FP8 rows.
        collectives: what moves rows between ranks inside plans.
    """

    decode_rows: int = Field(ge=1)
    segments: int = Field(ge=1)
    pool_tokens: int | None = Field(ge=1)
    packed_cache: bool
    packed_local: bool
    collectives: Literal["none", "plugin", "native"]


class EngineManifest(_Strict):
    """Content of engine.json.

    Attributes:
        geometry: the fields of :class:`ModelGeometry`; `geometry_digest` must be theirs.
        max_length: most tokens of a request, prompt and answer together.
        experts: how expert weights are stored.
        chunk_rows: rows that go through a stage together.
        versions: of the packages that built the engine.
        gpu, plugin_build, plans: None for engines that need none.
    """

    format_version: Literal[2]
    backend: Literal["torch", "tensorrt"]
    geometry: dict[str, object]
    geometry_digest: str
    profile: SplitProfile
    profile_digest: str
    checkpoint_fingerprint: str
    dtype: Literal["float64", "float32", "bfloat16"]
    experts: ExpertStorage
    artifact_format: ArtifactFormat
    tp_size: int = Field(ge=1)
    max_length: int = Field(ge=1)
    chunk_rows: int = Field(ge=1)
    versions: dict[str, str]
    gpu: str | None
    plugin_build: str | None
    plans: PlanRecord | None
    ranks: tuple[EngineRank, ...]
    tokenizer_files: tuple[EngineFile, ...]

    def artifact_identity(self, geometry: ModelGeometry) -> ArtifactIdentity:
        """What artifacts of this engine are told apart by from others of the same documents."""
        weights = self.checkpoint_fingerprint
        if self.experts != "same":
            # Rounded for the engine: what its layers produce is not what the checkpoint's own weights would.
            weights = digest_json([weights, "experts", self.experts])
        return ArtifactIdentity.of(geometry, self.profile, checkpoint_fingerprint=weights, form=self.artifact_format)

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def digest(self) -> str:
        """Of all fields; stands in engine.json beside them, so that no value changes unseen."""
        return digest_json(self.model_dump(mode="json"))

    def encode(self) -> bytes:
        content = {**self.model_dump(mode="json"), "digest": self.digest}
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def weight_files(rank: int, layers: int) -> tuple[str, ...]:
    """Paths of what a rank loads: one file a layer, then the tensors outside the layers."""
    names = [*(f"layer-{layer:04d}" for layer in range(layers)), "shared"]
    return tuple(f"rank-{rank:04d}/{name}.safetensors" for name in names)


def geometry_to_json(geometry: ModelGeometry) -> dict[str, object]:
    data: dict[str, object] = json.loads(json.dumps(asdict(geometry)))
    return data


def geometry_from_json(data: dict[str, object], path: Path) -> ModelGeometry:
    """Raises EngineError where the fields are not those of a geometry."""
    try:
        geometry = TypeAdapter(ModelGeometry).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise EngineError(
            f"manifest key 'geometry.{key}' is wrong: {first['msg']}", found=repr(first["input"])[:80], path=path,
            remedy=_REBUILD,
        ) from error  # fmt: skip
    unknown = sorted(data.keys() - geometry_to_json(geometry).keys())
    if unknown:
        raise EngineError(f"manifest key 'geometry.{unknown[0]}' is unknown", path=path, remedy=_REBUILD)
    return geometry


def read_manifest(directory: Path) -> tuple[EngineManifest, ModelGeometry]:
    """The manifest of an engine directory and its geometry.

    Raises:
        EngineError: no directory, no manifest, of another version, altered, or self-contradictory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise EngineError("this is not an engine directory", expected=MANIFEST, path=directory, remedy=_REBUILD)
    data = read_json_object(path, limit=_MANIFEST_LIMIT, error=EngineError)
    version = data.get("format_version")
    if version != FORMAT_VERSION:
        raise EngineError(
            "the manifest has another format version",
            expected=FORMAT_VERSION,
            found=version,
            path=path,
            remedy=_REBUILD,
        )
    stated = data.pop("digest", None)
    try:
        # JSON mode: the profile is strict, and in JSON a tuple is a list and a key a string.
        manifest = validated_json(EngineManifest, data, path)
    except ConfigError as error:
        raise EngineError(f"the manifest is ill-formed: {error.problem}", path=path, remedy=_REBUILD) from error
    geometry = geometry_from_json(manifest.geometry, path)
    _check_consistent(manifest, geometry, stated, path)
    return manifest, geometry


def _check_consistent(manifest: EngineManifest, geometry: ModelGeometry, digest: object, path: Path) -> None:
    try:
        manifest.profile.check(geometry)
    except ConfigError as error:
        raise EngineError(
            f"manifest key 'profile' contradicts the geometry: {error.problem}", expected=error.expected,
            found=error.found, path=path, remedy=_REBUILD,
        ) from error  # fmt: skip
    for name, stated, actual in (
        ("geometry_digest", manifest.geometry_digest, geometry.digest),
        ("profile_digest", manifest.profile_digest, manifest.profile.digest),
        ("ranks", [rank.rank for rank in manifest.ranks], list(range(manifest.tp_size))),
        ("digest", digest, manifest.digest),
    ):
        if stated != actual:
            raise EngineError(
                f"manifest key {name!r} contradicts the rest", expected=actual, found=stated, path=path, remedy=_REBUILD
            )


def check_files(directory: Path, files: tuple[EngineFile, ...], *, digests: bool) -> None:
    """Raise EngineError for the first file that is missing, of another size, or (if asked) of other content."""
    root = directory.resolve()
    for file in files:
        path = directory / file.path
        if not path.resolve().is_relative_to(root):
            raise EngineError(
                "a file of the engine is a link to outside of the engine directory", found=path.resolve(), path=path,
                remedy=_REBUILD,
            )  # fmt: skip
        if not path.is_file():
            raise EngineError("a file of the engine is missing", path=path, remedy=_REBUILD)
        size = path.stat().st_size
        if size != file.bytes:
            raise EngineError(
                "a file of the engine has another size", expected=file.bytes, found=size, path=path, remedy=_REBUILD
            )
        found = _digest(path) if digests else file.digest
        if found != file.digest:
            raise EngineError(
                "a file of the engine has other content than when it was built", expected=file.digest, found=found,
                path=path, remedy=_REBUILD,
            )  # fmt: skip


def _digest(path: Path) -> str:
    try:
        return digest_file(path)
    except OSError as error:
        raise EngineError(f"a file of the engine cannot be read: {error.strerror or error}", path=path) from error
