"""Artifacts on disk: what they hold, how they are certified, stored, leased and built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    # Imported on first use: some of them bring torch along, which a command's help need not wait for.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
