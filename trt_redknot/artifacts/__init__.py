"""Artifacts on disk: what they hold, how they are certified, stored, leased and built."""

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
