"""Makes up documents and questions: who owns what, who works for whom and where, who is whose chief.

Kinds of questions, and what an answer needs:

    single       a fact stated in full, anywhere
    override     a fact that a later document replaced
    relation     somebody's employer or chief, the town of a firm: the single steps of two_hop and chain
    implied      a fact of a document that names its subject once, at its top
    continued    the same, and the top only says "the same person": the subject stands in the document before
    two_hop      the town of somebody's employer, which another document names
    chain        the chief of somebody's chief, whom another document names
    report       several facts of one person, as sentences: a longer answer
    steps        what two_hop and chain ask for, both steps as sentences: a longer answer
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trt_redknot.evaluation.nano.words import DAYS, FIRMS, LOOKS, NAMES, SCENES, SEASONS, THINGS, TOWNS, WEATHER

SHORT_KINDS = ("single", "override", "relation", "implied", "continued", "two_hop", "chain")
LONGER_KINDS = ("report", "steps")
KINDS = (*SHORT_KINDS, *LONGER_KINDS)
_LINKS = 2
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
        subjects: the person that each word is about, as a reader would take it: of a document with a subject that one;
            of the upper person of a later link of a line the person two links below.
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
    _employers: dict[str, str] = field(default_factory=dict)
    _towns: dict[str, str] = field(default_factory=dict)
    _homeless: dict[str, int] = field(default_factory=dict)
    _lines: list[list[str]] = field(default_factory=list)
    _open_lines: list[tuple[list[str], int]] = field(default_factory=list)
    _in_lines: set[str] = field(default_factory=set)
    _file: tuple[str, bool] | None = None
    _below: str | None = None

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
            about: list[str | None] = [subject] * len(sentence)
            if self._below is not None:
                about[sentence.index("is") + 1] = self._below
                self._below = None
            sentences.append((sentence, about))
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
        elsewhere = [firm for firm, passage in self._homeless.items() if passage < len(self.passages)]
        if elsewhere and self.rng.random() < 0.6:
            firm = self.rng.choice(elsewhere)
            del self._homeless[firm]
            self._towns[firm] = self.rng.choice(TOWNS)
            return ["The", "town", "of", firm, "is", self._towns[firm], "."]
        free = [name for name in self.people if name not in self._employers]
        if not free:
            return self._filler()
        person, firm = self.rng.choice(free), self.rng.choice(FIRMS)
        self._employers[person] = firm
        if firm not in self._towns and firm not in self._homeless:
            self._homeless[firm] = len(self.passages)
        return ["The", "employer", "of", person, "is", firm, "."]

    def _link(self) -> list[str]:
        """One link of a line of people; a line grows by one link at a time, in order."""
        waiting = [line for line in self._open_lines if line[1] < len(self.passages)]
        if waiting and self.rng.random() < 0.7:
            line = self.rng.choice(waiting)
            self._open_lines.remove(line)
            people = line[0]
        else:
            people = self._new_line()
            if not people:
                return self._filler()
        above = self._new_member()
        if above is None:
            return self._filler()
        below = people[-1]
        self._below = people[-2] if len(people) > 1 else None
        people.append(above)
        if len(people) > _LINKS:
            self._lines.append(people)
        else:
            self._open_lines.append((people, len(self.passages)))
        return ["The", "chief", "of", below, "is", above, "."]

    def _new_line(self) -> list[str]:
        first = self._new_member()
        return [] if first is None else [first]

    def _new_member(self) -> str | None:
        free = [name for name in self.people if name not in self._in_lines]
        if not free:
            return None
        name = self.rng.choice(free)
        self._in_lines.add(name)
        return name

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
        if kind == "two_hop":
            return [
                _question(kind, ("What", "is", "the", "town", "of", "the", "employer", "of", who, "?"),
                          (self._towns[firm],), firm)
                for who, firm in self._employers.items()
                if firm in self._towns
            ]  # fmt: skip
        if kind == "chain":
            return [
                _question(kind, ("Who", "is", "the", "chief", "of", "the", "chief", "of", people[0], "?"),
                          people[-1:], people[1])
                for people in self._lines
            ]  # fmt: skip
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

    def _relations(self) -> list[Question]:
        lines = [*self._lines, *(people for people, _ in self._open_lines)]
        chiefs = [("Who", "chief", below, above) for people in lines for below, above in pairwise(people)]
        employers = [("What", "employer", who, firm) for who, firm in self._employers.items()]
        towns = [("What", "town", firm, town) for firm, town in self._towns.items()]
        return [
            _question("relation", (ask, "is", "the", what, "of", whose, "?"), (answer,))
            for ask, what, whose, answer in (*chiefs, *employers, *towns)
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
        employed = [
            ("town", "employer", who, firm, self._towns[firm])
            for who, firm in self._employers.items()
            if firm in self._towns
        ]
        chiefs = [("chief", "chief", *people) for people in self._lines]
        return [
            _question(
                "steps",
                ("Report", "the", second, "of", "the", first, "of", who, "."),
                _told((first, who, bridge), (second, bridge, last)),
            )
            for second, first, who, bridge, last in (*employed, *chiefs)
        ]


def _told(*steps: tuple[str, str, str]) -> list[str]:
    """One sentence a step: what, whose, which."""
    return [word for what, whose, which in steps for word in ("The", what, "of", whose, "is", which, ".")]


def _question(kind: str, words: Sequence[str], answer: Sequence[str], bridge: str | None = None) -> Question:
    return Question(kind=kind, words=tuple(words), answer=tuple(answer), bridge=bridge)


def header(number: int) -> list[str]:
    """What stands above the passage of that number, from 1."""
    return ["Passage", str(number), ":"]
