"""Prompts: the same tokens however they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evaluation.samples import record
from trt_redknot.errors import RequestError
from trt_redknot.evaluation.prompts import Cutting, CuttingError, make_prompt
from trt_redknot.evaluation.records import Record


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def passages(count: int, words: int, dataset: str = "hotpotqa") -> Record:
    context = "\n\n".join(f"Passage {i}:\n{'word ' * (words + i)}" for i in range(1, count + 1))
    return Record.model_validate_json(json.dumps(record(context=context, dataset=dataset)))


@given(
    count=st.integers(1, 9), words=st.integers(0, 30), documents=st.none() | st.integers(1, 12),
    multiple=st.none() | st.sampled_from([1, 4, 32, 128]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_cutting_changes_documents_and_not_tokens(
    count: int, words: int, documents: int | None, multiple: int | None
) -> None:
    made = passages(count, words)
    plain = make_prompt(made, bytes_of, Cutting())
    cutting = Cutting(documents=documents, multiple=multiple)
    if multiple is not None and sum(map(len, plain.documents)) < multiple:
        with pytest.raises(CuttingError, match=f"at least {multiple} tokens"):
            make_prompt(made, bytes_of, cutting)
        return
    cut = make_prompt(made, bytes_of, cutting)
    assert cut.documents
    assert cut.tokens == plain.tokens
    assert len(plain.documents) == count
    assert all(cut.documents)
    if documents is not None and multiple is None:
        assert len(cut.documents) == min(documents, count)
    if multiple is not None:
        assert all(len(document) % multiple == 0 for document in cut.documents)


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_order_keeps_the_documents(order: str) -> None:
    made = passages(6, 3)
    given_, other = (make_prompt(made, bytes_of, Cutting(order=o)) for o in ("given", order))  # type: ignore[arg-type]
    assert sorted(other.documents) == sorted(given_.documents)
    assert other.documents != given_.documents
    assert other == make_prompt(made, bytes_of, Cutting(order=order))  # type: ignore[arg-type]


ONLY = "only give me the answer and do not output any other words."
GIVEN = f"Answer the question based on the given passages. {ONLY.capitalize()}"


def test_templates_are_longbenchs() -> None:
    prompt = make_prompt(passages(1, 2, "multifieldqa_en"), bytes_of, Cutting())
    assert bytes(prompt.before).decode() == "Read the following text and answer briefly.\n\n"
    assert bytes(prompt.after).decode() == (
        f"\n\nNow, answer the following question based on the above text, {ONLY}"
        "\n\nQuestion: Where does Olin work?\nAnswer:"
    )
    prompt = make_prompt(passages(2, 2, "2wikimqa"), bytes_of, Cutting())
    assert bytes(prompt.before).decode() == f"{GIVEN}\n\nThe following are given passages.\n"
    assert bytes(prompt.after).decode() == f"\n\n{GIVEN}\n\nQuestion: Where does Olin work?\nAnswer:"


def test_a_context_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        make_prompt(passages(2, 2), lambda text: [], Cutting())
