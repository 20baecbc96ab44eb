"""Text in pieces: joined it is the text of all ids, every piece is whole, and stop texts never show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.serving.support import byte_tokenizer
from trt_redknot.serving.text import AnswerText, Detokenizer, StopTexts

TOKENIZER = byte_tokenizer()


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids)))


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_pieces_of_any_bytes_join_to_their_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    assert "".join([*(detokenizer.push(token) for token in ids), detokenizer.finish()]) == decode(ids)


@given(st.text(max_size=30))
def test_characters_come_whole_and_as_soon_as_they_are(text: str) -> None:
    detokenizer = Detokenizer(decode)
    shown = ""
    for place, token in enumerate(ids := encode(text)):
        shown += detokenizer.push(token)
        whole = bytes_of(ids[: place + 1]).decode("utf-8", errors="ignore")
        # A replacement character of the text itself looks like half a character until the next one comes.
        assert shown == whole or "\ufffd" in text
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


@given(st.text("\ufffda\u20ac\U0001f600", max_size=12))
@example("\ufffd\ufffd")
@example("a\ufffd\ufffd\ufffdb")
def test_replacement_characters_of_the_text_itself_are_not_multiplied(text: str) -> None:
    detokenizer = Detokenizer(decode)
    shown = ""
    for token in encode(text):
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def bytes_of(ids: list[int]) -> bytes:
    return b"".join(BYTES[token] for token in ids)


def byte_table() -> dict[int, bytes]:
    """Which id stands for which byte: printable ones for themselves, the others, in order, for letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letters = {value: chr(value) for value in printable} | {value: chr(256 + n) for n, value in enumerate(others)}
    return {TOKENIZER.token_to_id(letter): bytes([value]) for value, letter in letters.items()}


BYTES = byte_table()


@given(st.text("ab", min_size=0, max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_texts_end_the_answer_before_the_first_of_them(text: str, stops: list[str]) -> None:
    matcher = StopTexts(stops)
    shown = ""
    for letter in text:
        shown += matcher.push(letter)
        assert not any(stop in shown for stop in stops)
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not ends:
        assert not matcher.met
        assert shown + matcher.finish() == text
    else:
        # The stop text that is complete first ends the answer; of those that end together, the one that began first.
        end = min(ends)
        first = min(text[:end].find(stop) for stop in stops if stop in text[:end])
        assert matcher.met
        assert shown == text[:first]
        assert matcher.finish() == ""


@pytest.mark.parametrize("pieces", [["the e", "nd is near"], ["the end is near"], list("the end is near")])
def test_a_stop_text_over_several_tokens(pieces: list[str]) -> None:
    matcher = StopTexts(["end is", "never"])
    assert "".join(matcher.push(piece) for piece in pieces) == "the "
    assert matcher.met


def test_what_only_looks_like_a_stop_text_is_shown_in_time() -> None:
    matcher = StopTexts(["stop now"])
    assert matcher.push("please stop") == "please "
    assert matcher.push(" no") == ""
    assert matcher.push("t yet") == "stop not yet"


def test_an_answer_joins_both() -> None:
    answer = AnswerText(decode, ["\u20ac\u20ac"])
    shown = [answer.push(token) for token in encode("a\u20ac b\u20ac\u20ac c")]
    assert "".join(shown) == answer.text == "a\u20ac b"
    assert answer.stopped
    assert answer.finish() == ""
    unstopped = AnswerText(decode, ["\u20ac\u20ac"])
    shown = [unstopped.push(token) for token in encode("a\u20ac")[:-1]]
    assert shown == ["a", "", ""]
    assert unstopped.finish() == "\ufffd"
    assert unstopped.text == "a\ufffd"


def test_an_engine_without_a_tokenizer_has_no_text() -> None:
    answer = AnswerText(None, [])
    assert answer.push(5) == answer.finish() == ""
    assert answer.text is None
    assert not answer.stopped
