"""What an artifact belongs to: checkpoint, profile, geometry, rope tables, format; and how its id follows from that."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_bytes, digest_json
from trt_redknot.errors import ConfigError

_ID_DIGITS = 32


@dataclass(frozen=True, kw_only=True)
class ArtifactIdentity:
    """What an engine must have in common with an artifact to reuse it."""

    checkpoint_fingerprint: str
    profile_digest: str
    geometry_digest: str
    rope_digest: str
    format: ArtifactFormat

    @classmethod
    def of(
        cls, geometry: ModelGeometry, profile: SplitProfile, *, checkpoint_fingerprint: str, form: ArtifactFormat
    ) -> ArtifactIdentity:
        ropes = [asdict(geometry.rope_sliding), asdict(geometry.rope_compressed)]
        return cls(
            checkpoint_fingerprint=checkpoint_fingerprint,
            profile_digest=profile.digest,
            geometry_digest=geometry.digest,
            rope_digest=digest_json(ropes),
            format=form,
        )


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Output groups [first_group, last_group) and heads [first_head, last_head) of one rank."""

    first_group: int
    last_group: int
    first_head: int
    last_head: int


@dataclass(frozen=True, kw_only=True)
class TpGeometry:
    """Which rank holds which output groups and heads."""

    shares: tuple[RankShare, ...]

    @property
    def size(self) -> int:
        return len(self.shares)

    @classmethod
    def even(cls, geometry: ModelGeometry, size: int) -> TpGeometry:
        """The layout of every engine: the output groups, in order, split evenly; ConfigError where they cannot be."""
        if size < 1 or geometry.output_groups % size:
            allowed = [parts for parts in range(1, geometry.output_groups + 1) if geometry.output_groups % parts == 0]
            raise ConfigError(
                "the output groups cannot be split over the ranks",
                expected=f"a tensor-parallel size among {allowed}",
                found=size,
            )
        groups, heads = geometry.output_groups // size, geometry.heads // size
        return cls(
            shares=tuple(
                RankShare(
                    first_group=rank * groups,
                    last_group=(rank + 1) * groups,
                    first_head=rank * heads,
                    last_head=(rank + 1) * heads,
                )
                for rank in range(size)
            )
        )


def artifact_id_of(namespace: str, token_digest: str, identity: ArtifactIdentity) -> str:
    """The id of a document's artifact: 32 hex digits over namespace, tokens and identity, but not the ranks."""
    fields = asdict(identity)
    parts = [namespace, token_digest, *(str(fields[name]) for name in sorted(fields))]
    return digest_bytes(*(part.encode() for part in parts))[:_ID_DIGITS]
