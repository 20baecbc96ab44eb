"""What a caller asks: segments, sampling, reuse policy. Checked against an engine before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trt_redknot.config.policy import ReusePolicy


@dataclass(frozen=True)
class Tokens:
    """Fresh tokens of a request."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Artifact:
    """A document that was seen before.

    Attributes:
        artifact_id: what `Engine.build_artifact` returned.
        edits: position in the document -> token id, where the document now differs from the artifact (dirty rows).
        tokens: the document's token ids, for a caller who wants an answer even when the store has lost the document.
    """

    artifact_id: str
    edits: Mapping[int, int] = field(default_factory=dict)
    tokens: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy. Same seed, same request, same engine: same tokens."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """Segments in order, and how to answer. `reuse=None` is the recompute arm over the same tokens.

    Attributes:
        stop_tokens: generation ends after one of these; left out: the checkpoint's own.
    """

    segments: Sequence[Artifact | Tokens]
    max_new_tokens: int = 16
    reuse: ReusePolicy | None = field(default_factory=ReusePolicy)
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: Sequence[int] | None = None
    request_id: str | None = None
