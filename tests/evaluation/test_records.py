"""LongBench records: what is read, how contexts are cut, and every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation.samples import record, write
from trt_redknot.evaluation.records import Record, RecordError, read_records


@pytest.mark.parametrize("dataset", ["2wikimqa", "hotpotqa", "2wikimqa_e", "hotpotqa_e"])
def test_passages_become_documents(tmp_path: Path, dataset: str) -> None:
    (found,) = read_records(write(tmp_path / "r.jsonl", record(dataset=dataset)))
    assert found.documents == (
        "Passage 1:\nOlin works at the mill.\n\n",
        "Passage 2:\nThe mill stands in Norrby.",
    )
    assert (found.input, found.answers, found.kind) == ("Where does Olin work?", ("Norrby",), dataset)


def test_a_multifieldqa_context_is_one_document(tmp_path: Path) -> None:
    (found,) = read_records(write(tmp_path / "r.jsonl", record(dataset="multifieldqa_en")))
    assert found.documents == (found.context,)


@given(before=st.text(max_size=40), bodies=st.lists(st.text(max_size=60), max_size=6))
@settings(max_examples=100, deadline=None)
def test_documents_joined_are_the_context(before: str, bodies: list[str]) -> None:
    context = before + "".join(f"\nPassage {i}:\n{body}\n" for i, body in enumerate(bodies, 1)) or "x"
    found = Record.model_validate_json(json.dumps(record(context=context)))
    assert "".join(found.documents) == context
    assert all(found.documents)


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", record(), "", record(_id="other"), "   ")
    assert [found.id for found in read_records(path)] == ["abc", "other"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], ["line 1 is ill-formed"]),
        (["[1]"], ["line 1 is ill-formed", "expected a JSON object"]),
        ([record(), record(_id="b", answers=...)], ["line 2", "key 'answers' is missing"]),
        ([record(extra=1)], ["line 1", "key 'extra' is unknown"]),
        ([record(answers=[])], ["line 1", "key 'answers'"]),
        ([record(answers="Norrby")], ["line 1", "key 'answers'"]),
        ([record(input="")], ["line 1", "key 'input'"]),
        ([record(length="12")], ["line 1", "key 'length'"]),
        ([record(dataset="narrativeqa")], ["line 1 is of an unknown data set", "hotpotqa", "narrativeqa"]),
        ([record(language="zh")], ["line 1 is in another language", "expected en"]),
        ([record(), record()], ["line 2 repeats an id", "of line 1"]),
        ([""], ["the record file is empty"]),
    ],
)
def test_faults_are_named_with_their_line(tmp_path: Path, lines: list[dict[str, Any] | str], words: list[str]) -> None:
    path = write(tmp_path / "r.jsonl", *lines)
    with pytest.raises(RecordError) as caught:
        read_records(path)
    for word in [*words, str(path)]:
        assert word in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
