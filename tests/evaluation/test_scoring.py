"""F1 and exact match, against examples written out by hand and against a slow implementation of the definition."""

from __future__ import annotations

import string
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trt_redknot.evaluation.scoring import best_exact_match, best_f1, exact_match, f1_score, normalize_answer

WORDS = st.lists(
    st.sampled_from(
        ["a", "The", "an", "theory", "Paris,", "paris", "x-ray", "(the)", "42", "42.", "", "  ", "the\tend"]
    ),
    max_size=8,
).map(" ".join)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("a theory of the anthem", "theory of anthem"),
        ("An A.\nthe", ""),
        ("U.S. Army", "us army"),
        ("naïve “quote”", "naïve “quote”"),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        ("the red boat", "red boat", Fraction(1)),
        ("red boat in Norrby", "red boat", Fraction(2, 3)),
        ("red red", "red", Fraction(2, 3)),
        ("red", "red red", Fraction(2, 3)),
        ("blue", "red", Fraction(0)),
        ("", "red", Fraction(0)),
        ("the", "a", Fraction(0)),
        ("yes, it is", "Yes it was.", Fraction(2, 3)),
    ],
)
def test_f1_by_hand(prediction: str, reference: str, score: Fraction) -> None:
    assert f1_score(prediction, reference) == pytest.approx(float(score), abs=1e-12)


def test_the_best_reference_counts() -> None:
    assert best_f1("red boat", ["a house", "the red boat", "boat"]) == 1.0
    assert best_f1("red boat", ["a house", "boat"]) == pytest.approx(2 / 3)
    assert best_exact_match("The Red boat.", ["house", "red boat"]) == 1.0
    assert best_exact_match("red boats", ["house", "red boat"]) == 0.0


def slow_words(text: str) -> list[str]:
    kept = ""
    for character in text:
        if character not in string.punctuation:
            kept += character.lower()
    words = []
    # A word border is where letters, digits or underscores begin or end: articles count only between such borders.
    current = ""
    for character in [*kept, " "]:
        if character.isspace():
            if current and current not in ("a", "an", "the"):
                words.append(current)
            current = ""
        else:
            current += character
    return words


def slow_f1(prediction: str, reference: str) -> Fraction:
    predicted, wanted = slow_words(prediction), slow_words(reference)
    left, shared = list(wanted), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            shared += 1
    return Fraction(2 * shared, len(predicted) + len(wanted)) if shared else Fraction(0)


@given(prediction=WORDS, reference=WORDS)
@settings(max_examples=300, deadline=None)
def test_f1_is_the_definition(prediction: str, reference: str) -> None:
    assert f1_score(prediction, reference) == pytest.approx(float(slow_f1(prediction, reference)), abs=1e-12)
    assert f1_score(prediction, reference) == pytest.approx(f1_score(reference, prediction), abs=1e-12)
    assert exact_match(prediction, reference) == float(slow_words(prediction) == slow_words(reference))
