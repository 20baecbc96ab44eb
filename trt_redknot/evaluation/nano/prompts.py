"""Prompts with one question, for scoring and for record files in the format of LongBench."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path

from trt_redknot.evaluation.nano.batches import passages_of, question_words
from trt_redknot.evaluation.nano.words import END, join_words
from trt_redknot.evaluation.nano.world import KINDS, LONGER_KINDS, SHORT_KINDS, Question, World, header

DATASET = "nano"
_TRIES = 200
# Room for the question and for an answer that is not part of the prompt.
_QUESTION_ROOM = 24


@dataclass(frozen=True, kw_only=True)
class NanoPrompt:
    """Documents and one question about them."""

    passages: tuple[tuple[str, ...], ...]
    question: Question

    @property
    def words(self) -> list[str]:
        """The prompt up to and with `Answer:`."""
        documents = [word for number, passage in enumerate(self.passages, 1) for word in (*header(number), *passage)]
        return documents + question_words(self.question)

    @property
    def answer(self) -> list[str]:
        return [*self.question.answer, END]

    def to_longbench(self, name: str) -> dict[str, object]:
        """The record as LongBench writes one; `name` becomes its `_id`."""
        context = "\n\n".join(
            f"Passage {number}:\n{join_words(list(passage))}" for number, passage in enumerate(self.passages, 1)
        )
        return {
            "input": join_words(list(self.question.words)),
            "context": context,
            "answers": [join_words(list(self.question.answer))],
            "length": len(context.split()),
            "dataset": DATASET,
            "language": "en",
            "all_classes": None,
            "_id": name,
        }


def make_prompt(kind: str, length: int, rng: random.Random) -> NanoPrompt:
    """A prompt of about `length` tokens that asks a question of that kind.

    Raises:
        ValueError: no prompt that short allows such a question.
    """
    for _ in range(_TRIES):
        world = World(rng=rng, kinds=KINDS, small=length <= 256)
        passages_of(world, length - _QUESTION_ROOM)
        questions = world.questions(1, [kind])
        if questions:
            return NanoPrompt(passages=tuple(passage.words for passage in world.passages), question=questions[0])
    raise ValueError(f"no prompt of {length} tokens allows a question of kind {kind}")


def write_records(
    directory: Path, lengths: Sequence[int], *, seed: int, short: int = 10, longer: int = 5, files: int = 1,
    short_kinds: Sequence[str] = SHORT_KINDS,
) -> list[Path]:  # fmt: skip
    """Files of `short` records with short answers, then `longer` ones with longer answers; the kinds of each in turn.

    One file a length, or `files` numbered ones.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for length, part in product(lengths, range(1, files + 1)):
        label = f"{length}" if files == 1 else f"{length}.{part}"
        rng = random.Random(f"{seed}/records/{label}")
        kinds = [*islice(cycle(short_kinds), short), *islice(cycle(LONGER_KINDS), longer)]
        lines = [
            json.dumps(make_prompt(kind, length, rng).to_longbench(f"{kind}-{label}-{index:04d}"))
            for index, kind in enumerate(kinds)
        ]
        path = directory / f"{DATASET}-{label}.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(path)
    return paths


def write_documents(directory: Path, questions: Path, length: int, *, seed: int, files: int = 4) -> None:
    """One prompt as text files of several passages each, and a question of every kind about them.

    Args:
        questions: file of the questions as they stand behind the documents, with their answers, by kind.
    """
    rng = random.Random(f"{seed}/documents/{length}")
    for _ in range(_TRIES):
        world = World(rng=rng, kinds=KINDS)
        passages_of(world, length)
        asked = {kind: world.questions(1, [kind]) for kind in KINDS}
        if all(asked.values()):
            break
    else:
        raise ValueError(f"no documents of {length} tokens allow questions of all kinds")
    directory.mkdir(parents=True, exist_ok=True)
    texts = [
        join_words([*header(number), *passage.words]).replace(": ", ":\n", 1)
        for number, passage in enumerate(world.passages, 1)
    ]
    share = -(-len(texts) // files)
    for index in range(files):
        own = texts[index * share : (index + 1) * share]
        (directory / f"part-{index + 1}.txt").write_text("\n\n".join(own) + "\n", encoding="utf-8")
    content = {
        kind: {"question": join_words(question_words(found[0])), "answer": join_words(list(found[0].answer))}
        for kind, found in asked.items()
    }
    questions.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
