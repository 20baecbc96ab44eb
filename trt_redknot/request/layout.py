"""From the parts of a request to its tokens and segment table; every bad input is refused here, before anything
runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import RequestError, TooLongError
from trt_redknot.request.request import Artifact, Request, Tokens
from trt_redknot.request.segments import Segment, SegmentKind

_SEEDS = 2**63


@dataclass(frozen=True, kw_only=True)
class RequestLayout:
    """Tokens of a request and where its segments lie.

    Attributes:
        tokens: int64 [N], edits applied.
        segments: cover all N tokens, in order.
    """

    tokens: NDArray[np.int64]
    segments: tuple[Segment, ...]

    def as_fresh(self) -> RequestLayout:
        """The same tokens as one fresh segment: the recompute arm."""
        segment = Segment(index=0, kind=SegmentKind.FRESH, start=0, length=len(self.tokens))
        return RequestLayout(tokens=self.tokens, segments=(segment,))


def check_token_ids(ids: Sequence[int] | NDArray[np.int64], vocab: int, what: str) -> NDArray[np.int64]:
    """Token ids as int64. Raises RequestError for anything that is no id of the vocabulary."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{what} is not a list of token ids", found=str(error)) from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(
            f"{what} is not a list of token ids", expected="a flat list of integers",
            found=f"{array.ndim} dimensions of {array.dtype}",
        )  # fmt: skip
    outside = np.flatnonzero((array < 0) | (array >= vocab)) if array.size else np.empty(0, dtype=np.int64)
    if outside.size:
        raise RequestError(
            f"{what} has a token id outside the vocabulary", expected=f"0 .. {vocab - 1}",
            found=f"{int(array[outside[0]])} at position {int(outside[0])}",
            remedy="Tokenize with the tokenizer of this checkpoint.",
        )  # fmt: skip
    return array.astype(np.int64)


def apply_edits(
    tokens: NDArray[np.int64], edits: Mapping[int, int], vocab: int, what: str
) -> tuple[NDArray[np.int64], tuple[tuple[int, int], ...]]:
    """The document with its edits, and the edits that change a token, sorted by position."""
    edited = tokens.copy()
    for position, token in edits.items():
        if not 0 <= position < len(tokens):
            raise RequestError(
                f"an edit of {what} lies outside the document", expected=f"0 .. {len(tokens) - 1}", found=position
            )
        if not 0 <= token < vocab:
            raise RequestError(
                f"an edit of {what} has a token id outside the vocabulary", expected=f"0 .. {vocab - 1}", found=token
            )
        edited[position] = token
    changed = np.flatnonzero(edited != tokens)
    return edited, tuple((int(position), int(edited[position])) for position in changed)


def check_request(request: Request, geometry: ModelGeometry) -> None:
    """What can be said of a request without its documents. Raises RequestError."""
    if not request.segments:
        raise RequestError("the request is empty", expected="at least one segment with tokens")
    for index, part in enumerate(request.segments):
        if isinstance(part, Tokens):
            if len(check_token_ids(part.ids, geometry.vocab, f"segment {index}")) == 0:
                raise RequestError(f"segment {index} is empty", expected="at least one token", remedy="Leave it out.")
        elif isinstance(part, Artifact):
            _check_artifact(part, index)
        else:
            raise RequestError(
                f"segment {index} is of an unknown type", expected="Artifact or Tokens", found=type(part).__name__
            )
    if not _is_whole(request.max_new_tokens) or request.max_new_tokens < 1:
        raise RequestError(
            "max_new_tokens is out of range", expected="a whole number, 1 or more", found=request.max_new_tokens
        )
    if request.reuse is not None and not isinstance(request.reuse, ReusePolicy):
        raise RequestError("reuse is no policy", expected="ReusePolicy or None", found=type(request.reuse).__name__)
    sampling = request.sampling
    if not (sampling.temperature >= 0.0 and np.isfinite(sampling.temperature)):
        raise RequestError("the sampling temperature is out of range", expected="0 or more", found=sampling.temperature)
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError("top_p is out of range", expected="more than 0, at most 1", found=sampling.top_p)
    if sampling.top_k is not None and (not _is_whole(sampling.top_k) or sampling.top_k < 1):
        raise RequestError("top_k is out of range", expected="a whole number, 1 or more", found=sampling.top_k)
    if not isinstance(sampling.seed, int) or not 0 <= sampling.seed < _SEEDS:
        raise RequestError("the sampling seed is out of range", expected=f"0 .. {_SEEDS - 1}", found=sampling.seed)
    if request.stop_tokens is not None:
        check_token_ids(list(request.stop_tokens), geometry.vocab, "stop_tokens")


def _check_artifact(part: Artifact, index: int) -> None:
    if not isinstance(part.artifact_id, str):
        raise RequestError(
            f"the artifact id of segment {index} is no text", expected="what build_artifact returned",
            found=type(part.artifact_id).__name__,
        )  # fmt: skip
    edits = part.edits if isinstance(part.edits, Mapping) else None
    if edits is None or not all(_is_whole(number) for edit in edits.items() for number in edit):
        raise RequestError(
            f"the edits of segment {index} are ill-formed", expected="a mapping from positions to token ids",
            found=repr(part.edits)[:80],
        )  # fmt: skip


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer)


def lay_out(request: Request, documents: Sequence[NDArray[np.int64]], geometry: ModelGeometry) -> RequestLayout:
    """Segment table of a checked request.

    Args:
        documents: token ids of each Artifact segment of the request, in order.

    Neighbouring Tokens segments become one fresh segment: only then are its windows those of the native model.
    """
    remaining = iter(documents)
    tokens: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    start = 0
    for index, part in enumerate(request.segments):
        if isinstance(part, Tokens):
            ids = check_token_ids(part.ids, geometry.vocab, f"segment {index}")
            if segments and segments[-1].kind is SegmentKind.FRESH:
                last = segments.pop()
                merged = last.length + len(ids)
                segments.append(Segment(index=last.index, kind=SegmentKind.FRESH, start=last.start, length=merged))
            else:
                segments.append(Segment(index=len(segments), kind=SegmentKind.FRESH, start=start, length=len(ids)))
        else:
            ids, edits = apply_edits(next(remaining), part.edits, geometry.vocab, f"segment {index}")
            kind = SegmentKind.PREFIX if start == 0 and not edits else SegmentKind.RELOCATED
            segments.append(
                Segment(
                    index=len(segments),
                    kind=kind,
                    start=start,
                    length=len(ids),
                    artifact_id=part.artifact_id,
                    edits=edits,
                )
            )
        tokens.append(ids)
        start += len(ids)
    return RequestLayout(tokens=np.concatenate(tokens), segments=tuple(segments))


def check_length(layout: RequestLayout, request: Request, max_length: int) -> None:
    """Raise TooLongError where prompt and answer together are longer than the engine's declared limit."""
    length = len(layout.tokens) + request.max_new_tokens
    if length > max_length:
        raise TooLongError(
            "the request is too long", expected=f"at most {max_length} tokens, prompt and answer together",
            found=f"{len(layout.tokens)} + {request.max_new_tokens}",
            remedy="Shorten it, or build the engine with a larger --max-length.",
        )  # fmt: skip
