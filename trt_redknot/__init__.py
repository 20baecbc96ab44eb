"""trt_redknot: document reuse for DeepSeek-V4 on long prompts. Everything a program needs is importable from here."""

from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.engine.engine import Engine
from trt_redknot.engine.response import Response
from trt_redknot.request.request import Artifact, Request, Sampling, Tokens

__all__ = ["Artifact", "ArtifactStore", "Engine", "Request", "Response", "ReusePolicy", "Sampling", "Tokens"]
