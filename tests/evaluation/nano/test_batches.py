"""Training batches: answers are the targets, words know their subject, other processes make the same bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from trt_redknot.evaluation.nano.batches import IGNORE, Batch, Stage, curriculum, make_batch
from trt_redknot.evaluation.nano.feed import open_feed
from trt_redknot.evaluation.nano.objective import SECOND_WHAT, WHAT, WHOSE
from trt_redknot.evaluation.nano.words import END, NAMES, PAD, token_ids, vocabulary
from trt_redknot.evaluation.nano.world import KINDS, LONGER_KINDS

STAGES = curriculum(2048, (128, 512))


@pytest.mark.parametrize("stage", STAGES)
def test_targets_are_the_answers(stage: Stage) -> None:
    batch = make_batch(stage, random.randrange(2**31), 3)
    words = vocabulary()
    shape = (stage.sequences, stage.length)
    assert batch.tokens.shape == batch.targets.shape == batch.subjects.shape == batch.kinds.shape == shape
    asked = 0
    for tokens, targets, kinds in zip(batch.tokens, batch.targets, batch.kinds, strict=True):
        text = [words[token] for token in tokens]
        places = np.flatnonzero(targets != IGNORE)
        # Every target is the next token; an answer runs from behind "Answer :" to the end mark.
        assert (targets[places] == tokens[places + 1]).all()
        answers = [i for i, (a, b) in enumerate(pairwise(text)) if (a, b) == ("Answer", ":")]
        expected = {place for start in answers for place in range(start + 1, text.index(END, start))}
        assert set(places.tolist()) == expected
        asked += len(answers)
        found = np.flatnonzero(kinds != IGNORE)
        assert set(found) <= set(places), "what is found is part of an answer"
        assert all(any(start < place + 1 <= text.index(END, start) for start in answers) for place in found)
        assert len(found) >= len(answers), "every answer has something to find"
        assert END not in [text[place + 1] for place in found]
        assert PAD not in text[: len(tokens) - int((tokens == 0).sum())]
    assert asked >= stage.sequences


def test_subjects_are_people_of_the_text() -> None:
    batch = make_batch(STAGES[1], random.randrange(2**31), 0)
    names = {token_ids()[name] for name in NAMES}
    known = batch.subjects[batch.subjects != IGNORE]
    assert known.size > 0
    assert set(known.tolist()) <= names
    for tokens, subjects in zip(batch.tokens, batch.subjects, strict=True):
        for place in np.flatnonzero(subjects != IGNORE):
            assert subjects[place] in tokens[: place + 3], "a subject is named before it is used"


def test_a_step_has_one_batch_and_other_processes_make_it_too() -> None:
    stage, seed, first = STAGES[0], random.randrange(2**31), 5
    expected = [make_batch(stage, seed, step) for step in range(first, first + 5)]
    with open_feed(stage, seed, first, workers=2) as feed:
        for step, batch in enumerate(expected, first):
            found = feed.batch(step)
            assert (found.tokens == batch.tokens).all()
            assert (found.targets == batch.targets).all()
            assert (found.subjects == batch.subjects).all()
            assert (found.kinds == batch.kinds).all()
    assert not (expected[0].tokens == expected[1].tokens).all()


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        Batch.from_bytes(b"123", STAGES[0])


def some_batches() -> list[Batch]:
    """So many that every kind of question is asked: one sequence in three asks for no steps, one in ten for no two."""
    seed = random.randrange(2**31)
    return [make_batch(STAGES[1], seed, step) for step in range(8)]


def test_of_sentences_only_what_stands_behind_is_has_to_be_found() -> None:
    words = vocabulary()
    longer = {KINDS.index(kind) for kind in LONGER_KINDS}
    seen = set()
    for batch in some_batches():
        for tokens, kinds in zip(batch.tokens, batch.kinds, strict=True):
            for place in np.flatnonzero(np.isin(kinds, list(longer))):
                seen.add(int(kinds[place]))
                assert words[tokens[place]] == "is"
    assert seen == longer


def test_two_steps_have_a_word_between() -> None:
    # Where the objective looks for what such a question asks.
    names, words = set(NAMES), vocabulary()
    seen = False
    for batch in some_batches():
        asked = batch.kinds != IGNORE
        two = np.isin(batch.kinds, [KINDS.index("two_hop"), KINDS.index("chain")])
        seen |= bool(two.any())
        for tokens, places in zip(batch.tokens, two, strict=True):
            for place in np.flatnonzero(places):
                whose, what, second = (words[tokens[place - back]] for back in (WHOSE, WHAT, SECOND_WHAT))
                assert whose in names
                assert (what, second) in (("employer", "town"), ("chief", "employer"))
        assert (batch.bridges[two] != batch.targets[two]).all()
        one = asked & ~two & (batch.kinds != KINDS.index("continued"))
        assert (batch.bridges[one] == batch.targets[one]).all()
        assert (batch.bridges[batch.kinds == KINDS.index("continued")] == IGNORE).all()
    assert seen
