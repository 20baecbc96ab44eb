"""trt_redknot: document reuse for DeepSeek-V4 on long prompts. Everything a program needs is importable from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_redknot.lazy import importer

if TYPE_CHECKING:
    from trt_redknot.artifacts.store import ArtifactStore
    from trt_redknot.config.policy import ReusePolicy
    from trt_redknot.engine.engine import Engine
    from trt_redknot.engine.response import Response
    from trt_redknot.request.request import Artifact, Request, Sampling, Tokens

__all__ = ["Artifact", "ArtifactStore", "Engine", "Request", "Response", "ReusePolicy", "Sampling", "Tokens"]

_HOMES = {
    "Artifact": "request.request",
    "ArtifactStore": "artifacts.store",
    "Engine": "engine.engine",
    "Request": "request.request",
    "Response": "engine.response",
    "ReusePolicy": "config.policy",
    "Sampling": "request.request",
    "Tokens": "request.request",
}

# Help texts and the checks of `doctor` must not wait for torch.
__getattr__ = importer(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
