"""Training batches: fixed shapes, the same for the same seed and step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.evaluation.nano.words import END, FIRMS, LOOKS, NAMES, NUMBERS, PAD, TOWNS, token_ids
from trt_redknot.evaluation.nano.world import KINDS, Question, World, header

IGNORE = -100
_ARRAYS = 5
_SMALL = 256
# Documents stop this many words before the end of a prompt: the questions with their answers follow.
_WORDS_A_QUESTION = 16
_LONGEST_PASSAGE = 150
# Words that answers have to find; the others follow from grammar or, as the names in a report, from the question.
_FOUND = frozenset((*LOOKS, *FIRMS, *TOWNS, *NAMES))
_MOST_QUESTIONS = 64


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
    world = World(rng=rng, kinds=stage.kinds, small=stage.length <= _SMALL)
    words, subjects = passages_of(world, stage.length - asked * _WORDS_A_QUESTION)
    answered = [False] * len(words)
    kinds: list[str | None] = [None] * len(words)
    bridges: list[str | None] = [None] * len(words)
    for question in world.questions(asked):
        ask, reply = question_words(question), [*question.answer, END]
        if len(words) + len(ask) + len(reply) <= stage.length:
            words += ask + reply
            answered += [False] * len(ask) + [True] * len(reply)
            found = LOOKS if question.kind == "report" else _FOUND
            kinds += [None] * len(ask) + [question.kind if word in found else None for word in reply]
            bridges += [None] * len(ask)
            bridges += [
                None if word not in found or question.kind == "continued" else question.bridge or word for word in reply
            ]
    subjects += [None] * (len(words) - len(subjects))
    return PromptWords(words=words, answered=answered, subjects=subjects, kinds=kinds, bridges=bridges)


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
    entries to choose among, and twice as often as others: they alone teach the second step."""
    return tuple(
        Stage(
            length=length,
            sequences=max(1, tokens // length),
            kinds=(*KINDS, "two_hop", "chain"),
            questions=max(2, min(_MOST_QUESTIONS, length // 40, 16 + length // 80)),
        )
        for length in lengths
    )
