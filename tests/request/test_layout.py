"""Requests become segment tables; bad ones are refused with the place and the value."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.released import released_geometry
from trt_redknot.errors import RequestError
from trt_redknot.request import Artifact, Request, Sampling, Tokens
from trt_redknot.request.file import read_request
from trt_redknot.request.layout import check_length, check_request, lay_out
from trt_redknot.request.segments import SegmentKind

DOCUMENT = np.arange(10, dtype=np.int64)


@pytest.fixture(scope="module")
def geometry() -> ModelGeometry:
    return dataclasses.replace(released_geometry("flash"), vocab=100)


def test_prefix_relocated_fresh(geometry: ModelGeometry) -> None:
    request = Request(segments=[Artifact("a"), Tokens([1, 2]), Tokens([3]), Artifact("b", edits={4: 99}), Tokens([5])])
    layout = lay_out(request, [DOCUMENT, DOCUMENT], geometry)
    assert [segment.kind for segment in layout.segments] == [
        SegmentKind.PREFIX, SegmentKind.FRESH, SegmentKind.RELOCATED, SegmentKind.FRESH,
    ]  # fmt: skip
    assert [(segment.start, segment.length) for segment in layout.segments] == [(0, 10), (10, 3), (13, 10), (23, 1)]
    assert [segment.index for segment in layout.segments] == [0, 1, 2, 3]
    assert layout.segments[2].edits == ((4, 99),)
    assert layout.tokens.tolist() == [*range(10), 1, 2, 3, 0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 5]
    assert DOCUMENT.tolist() == list(range(10)), "edits must not change the artifact's tokens"


def test_an_edited_first_document_is_no_prefix(geometry: ModelGeometry) -> None:
    edited = lay_out(Request(segments=[Artifact("a", edits={3: 7})]), [DOCUMENT], geometry)
    assert edited.segments[0].kind is SegmentKind.RELOCATED
    same = lay_out(Request(segments=[Artifact("a", edits={3: 3})]), [DOCUMENT], geometry)
    assert same.segments[0].kind is SegmentKind.PREFIX


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(segments=[]), "the request is empty"),
        (Request(segments=[Tokens([1]), Tokens([])]), "segment 1 is empty"),
        (Request(segments=[Tokens([1, 100])]), "expected 0 .. 99, found 100 at position 1"),
        (Request(segments=[Tokens([-1])]), "found -1 at position 0"),
        (Request(segments=[Tokens([1.5])]), "flat list of integers"),  # type: ignore[list-item]
        (Request(segments=[Tokens([[1]])]), "flat list of integers"),  # type: ignore[list-item]
        (Request(segments=["text"]), "expected Artifact or Tokens, found str"),  # type: ignore[list-item]
        (Request(segments=[Tokens([1])], max_new_tokens=0), "max_new_tokens is out of range"),
        (Request(segments=[Tokens([1])], max_new_tokens=2.5), "a whole number, 1 or more, found 2.5"),  # type: ignore[arg-type]
        (Request(segments=[Tokens([1])], reuse={"budget": 1}), "expected ReusePolicy or None, found dict"),  # type: ignore[arg-type]
        (Request(segments=[Artifact(5)]), "the artifact id of segment 0 is no text"),  # type: ignore[arg-type]
        (Request(segments=[Artifact("a", edits={1.5: 3})]), "the edits of segment 0 are ill-formed"),  # type: ignore[dict-item]
        (Request(segments=[Artifact("a", edits={1: 3.7})]), "found {1: 3.7}"),  # type: ignore[dict-item]
        (Request(segments=[Artifact("a", edits=[(1, 3)])]), "found [(1, 3)]"),  # type: ignore[arg-type]
        (Request(segments=[Tokens([1])], stop_tokens=[100]), "stop_tokens has a token id outside"),
        (Request(segments=[Tokens([1])], sampling=Sampling(temperature=-1.0)), "temperature"),
        (Request(segments=[Tokens([1])], sampling=Sampling(temperature=float("nan"))), "temperature"),
        (Request(segments=[Tokens([1])], sampling=Sampling(top_p=0.0)), "top_p"),
        (Request(segments=[Tokens([1])], sampling=Sampling(top_k=0)), "top_k"),
        (Request(segments=[Tokens([1])], sampling=Sampling(top_k=1.5)), "top_k"),  # type: ignore[arg-type]
    ],
)
def test_bad_requests(geometry: ModelGeometry, request_: Request, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_request(request_, geometry)
    assert says in str(refused.value)


@pytest.mark.parametrize("edits", [{10: 1}, {-1: 1}, {0: 100}, {0: -1}])
def test_bad_edits(geometry: ModelGeometry, edits: dict[int, int]) -> None:
    with pytest.raises(RequestError, match="an edit of segment 0"):
        lay_out(Request(segments=[Artifact("a", edits=edits)]), [DOCUMENT], geometry)


def test_too_long(geometry: ModelGeometry) -> None:
    request = Request(segments=[Tokens([1] * 10)], max_new_tokens=6)
    layout = lay_out(request, [], geometry)
    check_length(layout, request, 16)
    with pytest.raises(RequestError, match=r"at most 15 tokens.*10 \+ 6"):
        check_length(layout, request, 15)


def test_request_file(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(
        '{"segments": [{"artifact": "abc", "edits": {"3": 4}}, {"text": "hi"}, {"tokens": [1]}],'
        ' "reuse": {"budget": 0.25}, "max_new_tokens": 3, "sampling": {"seed": 5}}'
    )
    request = read_request(path, lambda: lambda text: [ord(letter) for letter in text])
    assert request.segments == [Artifact("abc", edits={3: 4}), Tokens([104, 105]), Tokens([1])]
    assert request.reuse is not None
    assert request.reuse.budget == 0.25
    assert (request.max_new_tokens, request.sampling.seed) == (3, 5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "ill-formed"),
        ("[]", "expected a JSON object"),
        ('{"segments": [{"artifact": "a", "edits": {"3": 4, "03": 5}}]}', "'segments.0.edits.03' is invalid"),
        ('{"segments": [], "temperature": 1}', "'temperature' is unknown"),
        ('{"segments": [{"text": "a", "tokens": [1]}]}', "either artifact, or tokens, or text"),
        ('{"segments": [{}]}', "either artifact, or tokens, or text"),
        ('{"segments": [{"tokens": ["1"]}]}', "segments.0.tokens.0"),
        ('{"segments": [], "reuse": {"budget": 2}}', "reuse.budget"),
        ('{"segments": [], "reuse": {"budgets": 0.1}}', "'reuse.budgets' is unknown"),
        ('{"max_new_tokens": 3}', "'segments' is missing"),
    ],
)
def test_bad_request_files(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(content)
    with pytest.raises(RequestError) as refused:
        read_request(path, lambda: list)  # type: ignore[arg-type,return-value]
    assert says in str(refused.value)
    assert str(path) in str(refused.value)


def test_missing_request_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read.*none\.json"):
        read_request(tmp_path / "none.json", lambda: list)  # type: ignore[arg-type,return-value]
