"""Makes up documents and questions: who owns what, who works for whom and where, who is whose chief.

Kinds of questions, and what an answer needs:

    single       a fact stated in full, anywhere
    override     a fact that a later document replaced
    relation     somebody's employer or chief, the town of a firm: the single steps of two_hop and chain
    implied      a fact of a document that names its subject once, at its top
    continued    the same, and the top only says "the same person": the subject stands in the document before
    two_hop      the town of somebody's employer, which another document names
    chain        the employer of somebody's chief, likewise
    report       several facts of one person, as sentences: a longer answer
    steps        what two_hop and chain ask for, both steps as sentences: a longer answer
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from trt_redknot.evaluation.nano.words import DAYS, FIRMS, LOOKS, NAMES, SCENES, SEASONS, THINGS, TOWNS, WEATHER

SHORT_KINDS = ("single", "override", "relation", "implied", "continued", "two_hop", "chain")
LONGER_KINDS = ("report", "steps")
KINDS = (*SHORT_KINDS, *LONGER_KINDS)
# How often a sentence says the second step of a question where the first one has been said.
_SECOND_STEP = 0.6
_FEW_PEOPLE = (5, 12)
_PEOPLE = (20, 40, len(NAMES))
_REPORTED = (3, 6)
# Words that a question with its answer may take.
QUESTION_WORDS = 18


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question: its kind, its words, the words of its answer.

    Attributes:
        bridge: what must be read before the answer can be: the employer of `two_hop`, the chief of `chain`.
    """

    kind: str
    words: tuple[str, ...]
    answer: tuple[str, ...]
    bridge: str | None = None


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A document without its number.

    Attributes:
        subjects: the person that each word is about, as a reader would take it: of a document with a subject that one.
    """

    words: tuple[str, ...]
    subjects: tuple[str | None, ...]


@dataclass(kw_only=True)
class _Fact:
    person: str
    thing: str
    look: str
    kind: str
    passage: int


@dataclass(frozen=True, kw_only=True)
class _Relation:
    whom: str
    passage: int


@dataclass(kw_only=True)
class World:
    """Everything said so far, and what may be asked about it.

    Attributes:
        kinds: question kinds that the documents should allow.
        small: documents of a few sentences about few people, for short prompts.
        related: how much more often than otherwise a sentence says who works where or under whom.
        people: who may be named. Few, so that knowing the person is not enough to find a fact.
    """

    rng: random.Random
    kinds: Sequence[str]
    small: bool = False
    related: float = 1.0
    passages: list[Passage] = field(default_factory=list)
    people: list[str] = field(default_factory=list)
    _facts: dict[tuple[str, str], _Fact] = field(default_factory=dict)
    _employers: dict[str, _Relation] = field(default_factory=dict)
    _chiefs: dict[str, _Relation] = field(default_factory=dict)
    _towns: dict[str, _Relation] = field(default_factory=dict)
    _file: tuple[str, bool] | None = None

    def __post_init__(self) -> None:
        count = self.rng.randint(*_FEW_PEOPLE) if self.small else self.rng.choice(_PEOPLE)
        self.people = self.rng.sample(NAMES, min(count, len(NAMES)))

    def add_passage(self) -> Passage:
        """One more document."""
        words: list[str] = []
        subjects: list[str | None] = []
        for sentence, about in self._sentences():
            words += sentence
            subjects += about
        passage = Passage(words=tuple(words), subjects=tuple(subjects))
        self.passages.append(passage)
        return passage

    def questions(self, count: int, kinds: Sequence[str] | None = None) -> list[Question]:
        """Up to `count` different questions, kinds in turn; a kind that is named twice is asked twice in each turn."""
        allowed = self.kinds if kinds is None else kinds
        by_kind = {kind: self._candidates(kind) for kind in allowed}
        for candidates in by_kind.values():
            self.rng.shuffle(candidates)
        chosen: list[Question] = []
        while len(chosen) < count and any(by_kind.values()):
            order = [kind for kind in allowed if by_kind[kind]]
            self.rng.shuffle(order)
            chosen += [by_kind[kind].pop() for kind in order[: count - len(chosen)] if by_kind[kind]]
        return chosen

    def _sentences(self) -> list[tuple[list[str], list[str | None]]]:
        low, high = (3, 5) if self.small else (6, 13)
        count = self.rng.randint(low, high)
        sentences: list[tuple[list[str], list[str | None]]] = []
        subject = self._open_file()
        if subject is not None:
            heading = self._heading(subject)
            sentences.append((heading, [subject] * len(heading)))
        while len(sentences) < count:
            if subject is not None and self.rng.random() < 0.6:
                sentence = self._implied(subject)
            else:
                sentence = self._free_sentence()
            sentences.append((sentence, [subject] * len(sentence)))
        return sentences

    def _open_file(self) -> str | None:
        """The person this document is a file of; None where it is a mixed one."""
        roll = self.rng.random()
        if self._file is not None and "continued" in self.kinds and roll < 0.6:
            self._file = (self._file[0], True)
            return self._file[0]
        if ("implied" in self.kinds or "continued" in self.kinds) and roll < 0.75:
            self._file = (self._new_person(), False)
            return self._file[0]
        self._file = None
        return None

    def _heading(self, subject: str) -> list[str]:
        assert self._file is not None
        return ["More", "about", "the", "same", "person", "."] if self._file[1] else ["About", subject, "."]

    def _new_person(self) -> str:
        known = {person for person, _ in self._facts}
        fresh = [name for name in self.people if name not in known]
        return self.rng.choice(fresh or self.people)

    def _implied(self, subject: str) -> list[str]:
        assert self._file is not None
        free = [thing for thing in THINGS if (subject, thing) not in self._facts]
        if not free:
            return self._filler()
        thing, look, here = self.rng.choice(free), self.rng.choice(LOOKS), len(self.passages)
        kind = "continued" if self._file[1] else "implied"
        self._facts[subject, thing] = _Fact(person=subject, thing=thing, look=look, kind=kind, passage=here)
        return ["The", thing, "is", look, "."]

    def _free_sentence(self) -> list[str]:
        makers = [(self._filler, 0.25), (self._fact, 0.45)]
        if "override" in self.kinds:
            makers.append((self._notice, 0.15))
        if "two_hop" in self.kinds:
            makers.append((self._employment, 0.25 * self.related))
        if "chain" in self.kinds:
            makers.append((self._link, 0.2 * self.related))
        maker = self.rng.choices([maker for maker, _ in makers], [weight for _, weight in makers])[0]
        return maker()

    def _fact(self) -> list[str]:
        person, thing = self.rng.choice(self.people), self.rng.choice(THINGS)
        if (person, thing) in self._facts:
            return self._filler()
        look, here = self.rng.choice(LOOKS), len(self.passages)
        self._facts[person, thing] = _Fact(person=person, thing=thing, look=look, kind="single", passage=here)
        return ["The", thing, "of", person, "is", look, "."]

    def _notice(self) -> list[str]:
        here = len(self.passages)
        old = [fact for fact in self._facts.values() if fact.kind != "override" and fact.passage < here]
        if not old:
            return self._fact()
        fact = self.rng.choice(old)
        fact.look = self.rng.choice([look for look in LOOKS if look != fact.look])
        fact.kind = "override"
        return ["The", fact.thing, "of", fact.person, "is", "now", fact.look, "."]

    def _employment(self) -> list[str]:
        """Who works where, or where a firm is: what a question asks for once another document said the first step."""
        homeless = self._said_before(self._employers, self._towns)
        if homeless and self.rng.random() < _SECOND_STEP:
            return self._relate(self._towns, "town", self.rng.choice(homeless), self.rng.choice(TOWNS))
        waiting = self._said_before(self._chiefs, self._employers)
        if not waiting or self.rng.random() >= _SECOND_STEP:
            waiting = [name for name in self.people if name not in self._employers]
        if not waiting:
            return self._filler()
        return self._relate(self._employers, "employer", self.rng.choice(waiting), self.rng.choice(FIRMS))

    def _link(self) -> list[str]:
        free = [name for name in self.people if name not in self._chiefs]
        if not free:
            return self._filler()
        below = self.rng.choice(free)
        above = self.rng.choice([name for name in self.people if name != below])
        return self._relate(self._chiefs, "chief", below, above)

    def _relate(self, known: dict[str, _Relation], what: str, whose: str, whom: str) -> list[str]:
        known[whose] = _Relation(whom=whom, passage=len(self.passages))
        return ["The", what, "of", whose, "is", whom, "."]

    def _said_before(self, first: dict[str, _Relation], second: dict[str, _Relation]) -> list[str]:
        """What earlier documents gave as the first step of a question, and nothing is said of as the second one."""
        named = (relation.whom for relation in first.values() if relation.passage < len(self.passages))
        return [whom for whom in dict.fromkeys(named) if whom not in second]

    def _filler(self) -> list[str]:
        choice = self.rng.choice
        return choice(
            (
                ["On", choice(DAYS), "the", choice(SCENES), "was", choice(WEATHER), "."],
                ["In", "the", choice(SEASONS), "the", choice(SCENES), "is", choice(WEATHER), "and", "quiet", "."],
                ["They", "crossed", "the", choice(SCENES), "before", choice(DAYS), "."],
                ["It", "was", choice(WEATHER), "near", "the", choice(SCENES), "."],
            )
        )

    def _candidates(self, kind: str) -> list[Question]:
        if kind in ("two_hop", "chain"):
            return [
                _question(kind, ("What", "is", "the", second, "of", "the", first, "of", who, "?"), (last,), bridge)
                for second, first, who, bridge, last in self._two_steps(kind)
            ]
        if kind == "report":
            return self._reports()
        if kind == "steps":
            return self._steps()
        if kind == "relation":
            return self._relations()
        return [
            _question(kind, ("What", "is", "the", fact.thing, "of", fact.person, "?"), (fact.look,))
            for fact in self._facts.values()
            if fact.kind == kind
        ]

    def _two_steps(self, kind: str) -> list[tuple[str, str, str, str, str]]:
        """(second, first, who, bridge, last): the second of the first of who is last, the first of who is bridge."""
        first, firsts, second, seconds = (
            ("employer", self._employers, "town", self._towns)
            if kind == "two_hop"
            else ("chief", self._chiefs, "employer", self._employers)
        )
        return [
            (second, first, who, step.whom, seconds[step.whom].whom)
            for who, step in firsts.items()
            if step.whom in seconds and seconds[step.whom].passage != step.passage
        ]

    def _relations(self) -> list[Question]:
        asked = (
            ("Who", "chief", self._chiefs),
            ("What", "employer", self._employers),
            ("What", "town", self._towns),
        )
        return [
            _question("relation", (ask, "is", "the", what, "of", whose, "?"), (relation.whom,))
            for ask, what, known in asked
            for whose, relation in known.items()
        ]

    def _reports(self) -> list[Question]:
        owned: dict[str, list[_Fact]] = {}
        for fact in self._facts.values():
            owned.setdefault(fact.person, []).append(fact)
        questions = []
        for person, facts in owned.items():
            if len(facts) >= 2:
                told = self.rng.sample(facts, min(len(facts), self.rng.randint(*_REPORTED)))
                listed = [word for fact in told for word in (fact.thing, ",")][:-1]
                answer = _told(*((fact.thing, person, fact.look) for fact in told))
                questions.append(_question("report", ("Report", "the", *listed, "of", person, "."), answer))
        return questions

    def _steps(self) -> list[Question]:
        return [
            _question(
                "steps",
                ("Report", "the", second, "of", "the", first, "of", who, "."),
                _told((first, who, bridge), (second, bridge, last)),
            )
            for kind in ("two_hop", "chain")
            for second, first, who, bridge, last in self._two_steps(kind)
        ]


def _told(*steps: tuple[str, str, str]) -> list[str]:
    """One sentence a step: what, whose, which."""
    return [word for what, whose, which in steps for word in ("The", what, "of", whose, "is", which, ".")]


def _question(kind: str, words: Sequence[str], answer: Sequence[str], bridge: str | None = None) -> Question:
    return Question(kind=kind, words=tuple(words), answer=tuple(answer), bridge=bridge)


def header(number: int) -> list[str]:
    """What stands above the passage of that number, from 1."""
    return ["Passage", str(number), ":"]
