"""Training batches: fixed shapes, the same for the same seed and step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.evaluation.nano.words import END, FIRMS, LOOKS, NAMES, NUMBERS, PAD, TOWNS, token_ids
from trt_redknot.evaluation.nano.world import KINDS, LONGER_KINDS, Question, World, header

IGNORE = -100
_ARRAYS = 5
_SMALL = 256
# Documents stop this many words before the end of a prompt: the questions with their answers follow.
_WORDS_A_QUESTION = 16
_LONGEST_PASSAGE = 150
# Words that answers have to find; of sentences those behind "is": the others follow from grammar or from the question.
_FOUND = frozenset((*LOOKS, *FIRMS, *TOWNS, *NAMES))
_MOST_QUESTIONS = 64
# In every other sequence: what questions of two steps need is said so much more often.
_RELATED = 4.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the curriculum.

    Attributes:
        length: tokens of a sequence.
        sequences: of a batch.
        kinds: question kinds; one that is named twice is asked twice as often.
        questions: most questions a sequence asks.
    """

    length: int
    sequences: int
    kinds: tuple[str, ...]
    questions: int

    @property
    def batch_bytes(self) -> int:
        """Of :func:`Batch.to_bytes`."""
        return _ARRAYS * 4 * self.sequences * self.length


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arrays [B, S], int32.

    Attributes:
        tokens: ids, padded at the end.
        targets: the next token where it belongs to an answer, else `IGNORE`.
        subjects: id of the person a document's word is about, else `IGNORE`.
        kinds: index in `KINDS` of the question where the next token is a word that its answer had to find, else
            `IGNORE`.
        bridges: at the same places, id of what must be read first: of the answer's own word where one step is enough;
            `IGNORE` where the documents' rows must have read before (`continued`).
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    subjects: NDArray[np.int32]
    kinds: NDArray[np.int32]
    bridges: NDArray[np.int32]

    def to_bytes(self) -> bytes:
        return np.stack([self.tokens, self.targets, self.subjects, self.kinds, self.bridges]).astype("<i4").tobytes()

    @classmethod
    def from_bytes(cls, content: bytes, stage: Stage) -> Batch:
        """Raises ValueError where the size is not the stage's."""
        if len(content) != stage.batch_bytes:
            raise ValueError(f"a batch has {stage.batch_bytes} bytes, not {len(content)}")
        arrays = np.frombuffer(content, dtype="<i4").reshape(_ARRAYS, stage.sequences, stage.length)
        return cls(tokens=arrays[0], targets=arrays[1], subjects=arrays[2], kinds=arrays[3], bridges=arrays[4])


@dataclass(frozen=True, kw_only=True)
class PromptWords:
    """One sequence as word lists: its questions are answered in place.

    Attributes:
        answered: the word is part of an answer, its end included.
        kinds: of the question that the word answers, where it had to be found.
        bridges: what must be read first for such a word.
    """

    words: list[str]
    answered: list[bool]
    subjects: list[str | None]
    kinds: list[str | None]
    bridges: list[str | None]


def make_batch(stage: Stage, seed: int, step: int) -> Batch:
    """The batch of `step`: a pure function of its arguments."""
    rng = random.Random(f"{seed}/{stage.length}/{step}")
    rows = [_row(make_sequence(stage, rng), stage.length) for _ in range(stage.sequences)]
    tokens, targets, subjects, kinds, bridges = (np.stack(column) for column in zip(*rows, strict=True))
    return Batch(tokens=tokens, targets=targets, subjects=subjects, kinds=kinds, bridges=bridges)


def make_sequence(stage: Stage, rng: random.Random) -> PromptWords:
    """Passages, then questions with their answers, at most `stage.length` words."""
    asked = rng.randint(max(1, stage.questions // 2), stage.questions)
    related = _RELATED if rng.random() < 0.5 else 1.0
    world = World(rng=rng, kinds=stage.kinds, small=stage.length <= _SMALL, related=related)
    words, subjects = passages_of(world, stage.length - asked * _WORDS_A_QUESTION)
    answered = [False] * len(words)
    kinds: list[str | None] = [None] * len(words)
    bridges: list[str | None] = [None] * len(words)
    for question in world.questions(asked):
        ask, reply = question_words(question), [*question.answer, END]
        if len(words) + len(ask) + len(reply) <= stage.length:
            words += ask + reply
            answered += [False] * len(ask) + [True] * len(reply)
            found = _found(question, reply)
            kinds += [None] * len(ask) + [question.kind if asked_for else None for asked_for in found]
            bridges += [None] * len(ask)
            bridges += [
                question.bridge or word if asked_for and question.kind != "continued" else None
                for word, asked_for in zip(reply, found, strict=True)
            ]
    subjects += [None] * (len(words) - len(subjects))
    return PromptWords(words=words, answered=answered, subjects=subjects, kinds=kinds, bridges=bridges)


def _found(question: Question, reply: Sequence[str]) -> list[bool]:
    """Which words of an answer have to be found."""
    before = ["", *reply[:-1]] if question.kind in LONGER_KINDS else ["is"] * len(reply)
    return [word in _FOUND and left == "is" for word, left in zip(reply, before, strict=True)]


def question_words(question: Question) -> list[str]:
    """How a question is put behind the passages."""
    return ["Question", ":", *question.words, "Answer", ":"]


def passages_of(world: World, room: int) -> tuple[list[str], list[str | None]]:
    """Adds passages to `world` until `room` words are nearly full; their words with headers, and whom each is about."""
    words: list[str] = []
    subjects: list[str | None] = []
    while len(world.passages) < len(NUMBERS):
        passage = world.add_passage()
        head = header(len(world.passages))
        words += [*head, *passage.words]
        subjects += [None] * len(head) + list(passage.subjects)
        longest = 45 if world.small else _LONGEST_PASSAGE
        if len(words) + longest > room:
            break
    return words, subjects


def _row(sequence: PromptWords, length: int) -> tuple[NDArray[np.int32], ...]:
    ids = token_ids()
    words = sequence.words[:length]
    tokens = np.full(length, ids[PAD], dtype=np.int32)
    tokens[: len(words)] = [ids[word] for word in words]
    targets = np.full(length, IGNORE, dtype=np.int32)
    places = np.flatnonzero(np.array(sequence.answered[:length], dtype=bool))
    targets[places - 1] = tokens[places]
    subjects = np.full(length, IGNORE, dtype=np.int32)
    for place, subject in enumerate(sequence.subjects[:length]):
        if subject is not None:
            subjects[place] = ids[subject]
    kinds = np.full(length, IGNORE, dtype=np.int32)
    for place, kind in enumerate(sequence.kinds[:length]):
        if kind is not None:
            kinds[place - 1] = KINDS.index(kind)
    bridges = np.full(length, IGNORE, dtype=np.int32)
    for place, bridge in enumerate(sequence.bridges[:length]):
        if bridge is not None:
            bridges[place - 1] = ids[bridge]
    return tokens, targets, subjects, kinds, bridges


def curriculum(tokens: int, lengths: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of `tokens` tokens a batch. Questions of two steps are asked from the first one on, where there are few
    entries to choose among, and four times as often as others: they alone teach the second step without words."""
    return tuple(
        Stage(
            length=length,
            sequences=max(1, tokens // length),
            kinds=(*KINDS, *("two_hop", "chain") * 3),
            questions=max(2, min(_MOST_QUESTIONS, length // 40, 16 + length // 80)),
        )
        for length in lengths
    )
