"""Request files: JSON in, a Request out. The format is in docs/requests.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trt_redknot.config.documents import read_json_object, validated_json
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import ConfigError, RequestError
from trt_redknot.request.request import Artifact, Request, Sampling, Tokens

Encode = Callable[[str], list[int]]

_LIMIT = 256 * 2**20


class StrictModel(BaseModel):
    """A part of a request as JSON: unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _position(key: object) -> object:
    """A JSON key as a position, where it is written as numbers are: "3" and "03" in one object would be one."""
    return int(key) if isinstance(key, str) and re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key) else key


class SegmentFile(StrictModel):
    """One segment: an artifact (with edits, and tokens to fall back on), or tokens, or text."""

    artifact: str | None = None
    edits: dict[Annotated[int, BeforeValidator(_position)], int] = Field(default_factory=dict)
    tokens: list[int] | None = None
    text: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> SegmentFile:
        if self.artifact is None and (self.tokens is None) == (self.text is None):
            raise ValueError("a segment has either artifact, or tokens, or text")
        if self.artifact is not None and self.text is not None:
            raise ValueError("an artifact segment has no text; give its tokens instead")
        if self.artifact is None and self.edits:
            raise ValueError("only an artifact segment has edits")
        return self


class SamplingFile(StrictModel):
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


class RequestFile(StrictModel):
    """Content of a request file. `reuse` null is the recompute arm; left out: the default policy."""

    segments: list[SegmentFile]
    max_new_tokens: int = 16
    reuse: Annotated[ReusePolicy | None, Field()] = Field(default_factory=ReusePolicy)
    sampling: SamplingFile = Field(default_factory=SamplingFile)
    stop_tokens: list[int] | None = None
    request_id: str | None = None


def read_request(path: Path, encode: Callable[[], Encode]) -> Request:
    """The request in a JSON file.

    Args:
        encode: gives the tokenizer; called only where a segment has text.

    Raises:
        RequestError: no such file, not JSON, an unknown key, a value of another type.
    """
    values = read_json_object(path, limit=_LIMIT, error=RequestError)
    try:
        content = validated_json(RequestFile, values, path)
    except ConfigError as error:
        raise RequestError(error.problem, path=path, remedy="Correct or remove the keys named.") from error
    return make_request(content, encode)


def no_texts() -> Encode:
    """For `make_request`: the texts were encoded before."""
    raise AssertionError("a segment has text where all texts should be tokens")


def make_request(content: RequestFile, encode: Callable[[], Encode] = no_texts) -> Request:
    """The request that a request file's content describes.

    Args:
        encode: gives the tokenizer; called only where a segment has text.
    """
    segments: list[Artifact | Tokens] = []
    for segment in content.segments:
        if segment.artifact is not None:
            segments.append(Artifact(segment.artifact, edits=segment.edits, tokens=segment.tokens))
        elif segment.tokens is not None:
            segments.append(Tokens(segment.tokens))
        else:
            segments.append(Tokens(encode()(segment.text or "")))
    return Request(
        segments=segments,
        max_new_tokens=content.max_new_tokens,
        reuse=content.reuse,
        sampling=Sampling(**content.sampling.model_dump()),
        stop_tokens=content.stop_tokens,
        request_id=content.request_id,
    )
