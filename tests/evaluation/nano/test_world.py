"""The synthetic documents: every question has the answer that a careful reader would give."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.evaluation.nano.network import make_tokenizer
from trt_redknot.evaluation.nano.prompts import NanoPrompt, make_prompt, write_documents, write_records
from trt_redknot.evaluation.nano.words import END, PAD, join_words, token_ids, vocabulary
from trt_redknot.evaluation.nano.world import KINDS, LONGER_KINDS, SHORT_KINDS
from trt_redknot.evaluation.records import read_records


class Reader:
    """Reads passages in order, as text, and answers questions from what they say."""

    def __init__(self, passages: list[str]) -> None:
        self.looks: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
        self.related: dict[tuple[str, str], tuple[int, str]] = {}
        subject = None
        for number, passage in enumerate(passages):
            how = "implied"
            for sentence in passage.split(". "):
                text = sentence.rstrip(".").strip()
                if found := re.fullmatch(r"About (\w+)", text):
                    subject, how = found[1], "implied"
                elif text == "More about the same person":
                    how = "continued"
                elif found := re.fullmatch(r"The (employer|town|chief) of (\w+) is (\w+)", text):
                    self.related[found[1], found[2]] = (number, found[3])
                elif found := re.fullmatch(r"The (\w+) of (\w+) is (now )?(\w+)", text):
                    self._look(found[2], found[1], number, found[4], "override" if found[3] else "single")
                elif found := re.fullmatch(r"The (\w+) is (\w+)", text):
                    assert subject is not None
                    self._look(subject, found[1], number, found[2], how)

    def _look(self, person: str, thing: str, passage: int, look: str, how: str) -> None:
        self.looks.setdefault((person, thing), []).append((passage, look, how))

    def answer(self, question: str) -> tuple[str, str]:
        """(answer, kind of question)."""
        if found := re.fullmatch(r"(?:What|Who) is the (\w+) of the (\w+) of (\w+)\?", question):
            first, between = self.related[found[2], found[3]]
            second, end = self.related[found[1], between]
            assert first != second, "one step a passage"
            return end, {"chief": "chain", "employer": "two_hop"}[found[2]]
        if found := re.fullmatch(r"(?:What|Who) is the (employer|town|chief) of (\w+)\?", question):
            return self.related[found[1], found[2]][1], "relation"
        if found := re.fullmatch(r"What is the (\w+) of (\w+)\?", question):
            said = self.looks[found[2], found[1]]
            if len(said) == 2:
                assert said[0][0] < said[1][0], "an override stands in a later passage"
                assert said[0][1] != said[1][1]
            assert len(said) <= 2
            return said[-1][1], said[-1][2]
        if found := re.fullmatch(r"Report the (\w+) of the (\w+) of (\w+)\.", question):
            between = self.related[found[2], found[3]][1]
            end = self.related[found[1], between][1]
            return f"The {found[2]} of {found[3]} is {between}. The {found[1]} of {between} is {end}.", "steps"
        found = re.fullmatch(r"Report the ([\w, ]+) of (\w+)\.", question)
        assert found is not None
        told = [(thing, self.looks[found[2], thing][-1][1]) for thing in found[1].split(", ")]
        return " ".join(f"The {thing} of {found[2]} is {look}." for thing, look in told), "report"


def texts(prompt: NanoPrompt) -> tuple[list[str], str, str]:
    return (
        [join_words(list(passage)) for passage in prompt.passages],
        join_words(list(prompt.question.words)),
        join_words(list(prompt.question.answer)),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(400, 1500), seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_a_reader_finds_the_answer(kind: str, length: int, seed: int) -> None:
    prompt = make_prompt(kind, length, random.Random(seed))
    passages, question, answer = texts(prompt)
    assert Reader(passages).answer(question) == (answer, kind)
    assert len(prompt.words) <= length
    assert len(prompt.words) > length - 200


@given(length=st.integers(256, 700), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_the_tokenizer_gives_the_words_back(length: int, seed: int) -> None:
    tokenizer = make_tokenizer()
    prompt = make_prompt("single", length, random.Random(seed))
    text = join_words(prompt.words)
    ids = tokenizer.encode(text).ids
    assert [vocabulary()[token] for token in ids] == prompt.words
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    answer = join_words(list(prompt.question.answer))
    assert tokenizer.decode([*tokenizer.encode(answer).ids, token_ids()[END]]) == answer


def test_record_files_are_longbenchs_and_the_same_for_a_seed(tmp_path: Path) -> None:
    first = write_records(tmp_path / "a", [300], seed=5, short=len(SHORT_KINDS), longer=len(LONGER_KINDS))[0]
    again = write_records(tmp_path / "b", [300], seed=5, short=len(SHORT_KINDS), longer=len(LONGER_KINDS))[0]
    other = write_records(tmp_path / "c", [300], seed=6, short=len(SHORT_KINDS), longer=len(LONGER_KINDS))[0]
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    records = read_records(first)
    assert [record.kind for record in records] == [*SHORT_KINDS, *LONGER_KINDS]
    for record in records:
        passages = [re.sub(r"^Passage \d+:\n", "", document).strip() for document in record.documents]
        assert Reader(passages).answer(record.input) == (record.answers[0], record.kind)


def test_documents_are_text_and_every_question_has_its_answer_in_them(tmp_path: Path) -> None:
    questions = tmp_path / "questions.json"
    write_documents(tmp_path / "documents", questions, 1200, seed=random.randrange(2**31), files=3)
    paths = sorted((tmp_path / "documents").iterdir())
    assert [path.name for path in paths] == ["part-1.txt", "part-2.txt", "part-3.txt"]
    text = "\n\n".join(path.read_text().strip() for path in paths)
    assert make_tokenizer().token_to_id(PAD) not in make_tokenizer().encode(text).ids
    reader = Reader([passage.strip().replace("\n", " ") for passage in re.split(r"Passage \d+:\n", text)[1:]])
    asked = json.loads(questions.read_text())
    assert list(asked) == list(KINDS)
    for kind, entry in asked.items():
        found = re.fullmatch(r"Question: (.*) Answer:", entry["question"])
        assert found is not None
        assert reader.answer(found[1]) == (entry["answer"], kind)


def test_a_prompt_too_short_for_its_question_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompt of 40 tokens"):
        make_prompt("chain", 40, random.Random(1))
