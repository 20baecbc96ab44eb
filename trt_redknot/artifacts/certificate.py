"""The certificate: what an artifact is, whom it fits, what every file of it must be. Parsed as if from an enemy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.artifacts.identity import ArtifactIdentity, RankShare, TpGeometry, artifact_id_of
from trt_redknot.artifacts.names import CERTIFICATE, LEASE_LOCK
from trt_redknot.config.documents import parse_json_object
from trt_redknot.digests import digest_bytes, digest_json

FORMAT_VERSION = 1
MAX_CERTIFICATE_BYTES = 4 << 20
MAX_FILES = 1 << 15
NAMESPACE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_SAFE_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 48)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CertifiedFile(_Strict):
    """One file: path relative to the generation's folder, size in bytes, BLAKE3."""

    path: Annotated[str, Field(min_length=1, max_length=256)]
    size: Count
    digest: Digest

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if not all(_SAFE_PART.fullmatch(part) for part in path.split("/")) or path in (CERTIFICATE, LEASE_LOCK):
            raise ValueError("unsafe path")
        return path


class CertifiedRank(_Strict):
    """Output groups and heads of one rank, as [first, last)."""

    groups: tuple[Count, Count]
    heads: tuple[Count, Count]


class Certificate(_Strict):
    """See docs/artifact-format.md. `layers` are the layers present; widths are channels, for decoding."""

    format_version: Literal[1]
    namespace: Annotated[str, Field(pattern=NAMESPACE_PATTERN)]
    artifact_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    generation: Annotated[int, Field(ge=1, lt=10**8)]
    created_at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    token_count: Annotated[int, Field(ge=1, lt=1 << 40)]
    token_digest: Digest
    checkpoint_fingerprint: Fingerprint
    profile_digest: Digest
    geometry_digest: Digest
    rope_digest: Digest
    artifact_format: Annotated[ArtifactFormat, Field(strict=False)]
    head_dim: Count
    rope_dim: Count
    index_dim: Count
    local_width: Count
    layers: Annotated[tuple[Count, ...], Field(min_length=1, max_length=4096)]
    layers_per_group: Annotated[int, Field(ge=1, le=4096)]
    tp_size: Annotated[int, Field(ge=1, le=4096)]
    ranks: Annotated[tuple[CertifiedRank, ...], Field(max_length=4096)]
    files: Annotated[tuple[CertifiedFile, ...], Field(min_length=1, max_length=MAX_FILES)]

    @model_validator(mode="after")
    def _consistent(self) -> Certificate:
        if len(self.ranks) != self.tp_size:
            raise ValueError(f"{len(self.ranks)} ranks described, tp_size is {self.tp_size}")
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("a file is listed twice")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers are not ascending")
        if self.rope_dim > self.head_dim:
            raise ValueError("rope_dim exceeds head_dim")
        if artifact_id_of(self.namespace, self.token_digest, self.identity) != self.artifact_id:
            raise ValueError("artifact_id does not follow from namespace, tokens and identity")
        return self

    @property
    def identity(self) -> ArtifactIdentity:
        return ArtifactIdentity(
            checkpoint_fingerprint=self.checkpoint_fingerprint,
            profile_digest=self.profile_digest,
            geometry_digest=self.geometry_digest,
            rope_digest=self.rope_digest,
            format=self.artifact_format,
        )

    @property
    def tp(self) -> TpGeometry:
        return TpGeometry(
            shares=tuple(
                RankShare(
                    first_group=rank.groups[0],
                    last_group=rank.groups[1],
                    first_head=rank.heads[0],
                    last_head=rank.heads[1],
                )
                for rank in self.ranks
            )
        )

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensor files."""
        return sum(file.size for file in self.files)

    @property
    def agreement_digest(self) -> str:
        """What ranks compare: everything but the generation and the time of building."""
        return digest_json(self.model_dump(mode="json", exclude={"generation", "created_at"}))

    def file(self, path: str) -> CertifiedFile | None:
        return next((file for file in self.files if file.path == path), None)

    def files_of(self, rank: int | None) -> tuple[CertifiedFile, ...]:
        """Files that `rank` reads: the common ones and its own. None: all."""
        if rank is None:
            return self.files
        own = f"rank-{rank:04d}/"
        return tuple(file for file in self.files if not file.path.startswith("rank-") or file.path.startswith(own))

    def encode(self) -> bytes:
        """The bytes of `certificate.json`: canonical JSON with a digest of itself."""
        body = self.model_dump(mode="json")
        return _canonical({**body, "digest": digest_bytes(_canonical(body))})


def certified_ranks(tp: TpGeometry) -> tuple[CertifiedRank, ...]:
    return tuple(
        CertifiedRank(
            groups=(share.first_group, share.last_group),
            heads=(share.first_head, share.last_head),
        )
        for share in tp.shares
    )


def parse_certificate(raw: bytes, *, label: str) -> Certificate:
    """The certificate in `raw`; ArtifactError with one of the CERTIFICATE faults where it is not one.

    Args:
        label: how the file is named in errors.
    """
    if len(raw) > MAX_CERTIFICATE_BYTES:
        raise ArtifactError(
            ArtifactFault.CERTIFICATE_TOO_LARGE,
            "a certificate is too large",
            expected=f"at most {MAX_CERTIFICATE_BYTES} bytes",
            found=f"{len(raw)} or more",
            path=label,
        )
    body = _object(raw, label)
    version = body.get("format_version")
    if version != FORMAT_VERSION or type(version) is not int:
        raise ArtifactError(
            ArtifactFault.CERTIFICATE_VERSION,
            "a certificate is of another format version",
            expected=FORMAT_VERSION,
            found=version,
            path=label,
            remedy="Build the artifact again.",
        )
    digest = body.pop("digest", None)
    certificate = _validated(body, label)
    if raw != _canonical({**body, "digest": digest}):
        raise ArtifactError(ArtifactFault.CERTIFICATE_NOT_CANONICAL, "a certificate is not canonical JSON", path=label)
    own = digest_bytes(_canonical(body))
    if digest != own:
        raise ArtifactError(
            ArtifactFault.CERTIFICATE_DIGEST,
            "a certificate contradicts its own digest",
            expected=own,
            found=digest,
            path=label,
        )
    return certificate


def _object(raw: bytes, label: str) -> dict[str, object]:
    try:
        return parse_json_object(raw)
    except ValueError as error:
        raise ArtifactError(
            ArtifactFault.CERTIFICATE_NOT_JSON, "a certificate is not a JSON object", found=error, path=label
        ) from error


def _validated(body: dict[str, object], label: str) -> Certificate:
    try:
        # Through JSON again: strict validation of JSON takes lists for tuples and nothing else for anything else.
        return Certificate.model_validate_json(json.dumps(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        path = bool(first["loc"]) and first["loc"][0] == "files" and first["loc"][-1] == "path"
        fault = ArtifactFault.CERTIFICATE_PATH if path else ArtifactFault.CERTIFICATE_FIELDS
        raise ArtifactError(
            fault, f"a certificate is ill-formed: {key or 'fields'}: {first['msg']}", path=label
        ) from error


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def certificate_bytes(certificate: Certificate, sizes: Sequence[tuple[str, int]]) -> int:
    """Exact bytes that `certificate` takes once its files are those of `sizes` (digests have one length)."""
    files = tuple(CertifiedFile(path=path, size=size, digest="0" * 64) for path, size in sizes)
    return len(certificate.model_copy(update={"files": files}).encode())
