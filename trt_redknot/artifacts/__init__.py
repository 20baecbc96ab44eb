"""Artifacts on disk: what they hold, how they are certified, stored, leased and built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_redknot.lazy import importer

if TYPE_CHECKING:
    from trt_redknot.artifacts.build import ArtifactBuild
    from trt_redknot.artifacts.certificate import Certificate
    from trt_redknot.artifacts.contents import Part, PartSpec, artifact_parts
    from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault
    from trt_redknot.artifacts.formats import ArtifactFormat
    from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry, artifact_id_of
    from trt_redknot.artifacts.lease import Lease
    from trt_redknot.artifacts.store import ArtifactStore

__all__ = [
    "ArtifactBuild",
    "ArtifactError",
    "ArtifactFault",
    "ArtifactFormat",
    "ArtifactIdentity",
    "ArtifactStore",
    "Certificate",
    "Lease",
    "Part",
    "PartSpec",
    "TpGeometry",
    "artifact_id_of",
    "artifact_parts",
]

_HOMES = {
    "ArtifactBuild": "build",
    "ArtifactError": "faults",
    "ArtifactFault": "faults",
    "ArtifactFormat": "formats",
    "ArtifactIdentity": "identity",
    "ArtifactStore": "store",
    "Certificate": "certificate",
    "Lease": "lease",
    "Part": "contents",
    "PartSpec": "contents",
    "TpGeometry": "identity",
    "artifact_id_of": "identity",
    "artifact_parts": "contents",
}

# Some of them bring torch along, which a command's help need not wait for.
__getattr__ = importer(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
