"""Answers against references, exactly as LongBench scores its English question answering: F1 and exact match."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def f1_score(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the normalised words, as bags; 0 where no word is shared."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(reference).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def exact_match(prediction: str, reference: str) -> float:
    """1 where both are the same after normalisation, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


def best_f1(prediction: str, references: Sequence[str]) -> float:
    """The largest F1 over the references, of which there is at least one."""
    return max(f1_score(prediction, reference) for reference in references)


def best_exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 where any of the references is matched."""
    return max(exact_match(prediction, reference) for reference in references)
