"""From pairs to means with intervals: by variant, and inside it by kind of question and by file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_redknot.errors import RequestError
from trt_redknot.evaluation.arms import PairResult
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.statistics import Interval, bootstrap

ALL = "all"

_METRICS: dict[str, Callable[[PairResult], float]] = {
    "f1_reuse": lambda pair: pair.reuse.f1,
    "f1_recompute": lambda pair: pair.recompute.f1,
    "f1_change": lambda pair: pair.reuse.f1 - pair.recompute.f1,
    "exact_reuse": lambda pair: pair.reuse.exact,
    "exact_recompute": lambda pair: pair.recompute.exact,
    "exact_change": lambda pair: pair.reuse.exact - pair.recompute.exact,
    "kl": lambda pair: pair.kl,
    "top1": lambda pair: float(pair.top1),
    "agreement": lambda pair: pair.same / pair.compared if pair.compared else 1.0,
    "token_rows_saved": lambda pair: pair.reuse.saved["token_rows"],
    "head_rows_saved": lambda pair: pair.reuse.saved["logical_head_rows"],
    "arithmetic_saved": lambda pair: pair.reuse.saved["arithmetic"],
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Some pairs of one variant.

    Attributes:
        by: `all`, `kind`, `file` or `group` (of questions); `name` is its value.
        metrics: by name; changes are paired, reuse minus recompute.
        worst_kl: largest KL of a pair.
        stops: answers that ended by themselves, reuse and recompute.
        loops: answers that ended in a repetition, the same.
        fanout: index k: (row, layer) pairs that ran k experts.
    """

    variant: str
    axis: str
    value: str
    by: str
    name: str
    pairs: int
    metrics: Mapping[str, Interval]
    worst_kl: float
    stops: tuple[int, int]
    loops: tuple[int, int]
    fanout: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "axis": self.axis,
            "value": self.value,
            "by": self.by,
            "name": self.name,
            "pairs": self.pairs,
            "metrics": {name: interval.to_json() for name, interval in self.metrics.items()},
            "worst_kl": self.worst_kl,
            "natural_stops": {"reuse": self.stops[0], "recompute": self.stops[1]},
            "repetitions": {"reuse": self.loops[0], "recompute": self.loops[1]},
            "fanout": list(self.fanout),
        }


@dataclass(frozen=True, kw_only=True)
class QuestionGroup:
    """Pairs that belong together by what is asked.

    Attributes:
        pattern: what is looked for in the question.
        without: the group is of questions that do not have it.
    """

    name: str
    pattern: re.Pattern[str]
    without: bool = False

    @classmethod
    def parse(cls, name: str, text: str) -> QuestionGroup:
        """From a name and a regular expression, with `!` before it: without it.

        Raises:
            RequestError: no regular expression.
        """
        try:
            return cls(name=name, pattern=re.compile(text.removeprefix("!")), without=text.startswith("!"))
        except re.error as error:
            raise RequestError(
                f"the pattern of group {name} is ill-formed: {error}", expected="a regular expression", found=text,
                remedy="Escape what is meant literally with a backslash.",
            ) from error  # fmt: skip

    def has(self, pair: PairResult) -> bool:
        return (self.pattern.search(pair.question) is None) == self.without


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything a report shows.

    Attributes:
        run: what the results depend on, as the journal's first line has it.
    """

    run: Mapping[str, Any]
    evidence: Evidence
    groups: Sequence[Group]
    pairs: Sequence[PairResult]

    def overall(self, axis: str | None = None) -> list[Group]:
        """The groups over all pairs, of one axis or of all, in the order of the variants."""
        return [group for group in self.groups if group.by == ALL and axis in (None, group.axis)]

    @property
    def left_out(self) -> list[Mapping[str, str]]:
        """Records that a variant left out: `variant`, `id`, `reason`. Runs of older versions left none out."""
        return list(self.run.get("left_out", []))

    @property
    def axes(self) -> list[str]:
        return list(dict.fromkeys(group.axis for group in self.groups))

    def to_json(self) -> dict[str, Any]:
        return {
            "evidence": self.evidence.value,
            "run": dict(self.run),
            "groups": [group.to_json() for group in self.groups],
        }


def summarise(
    run: Mapping[str, Any], pairs: Sequence[PairResult], evidence: Evidence, named: Sequence[QuestionGroup] = ()
) -> Summary:
    """Groups of all variants that have results: over all pairs, by kind, by file, and by the groups named, which are
    split by file as well."""
    groups: list[Group] = []
    for variant in run["variants"]:
        own = [pair for pair in pairs if pair.variant == variant["name"]]
        if not own:
            continue
        groups.append(_group(variant, ALL, ALL, own))
        for by, key in (("kind", _kind), ("file", _file)):
            values = sorted({key(pair) for pair in own})
            if len(values) > 1:
                groups += [_group(variant, by, value, [p for p in own if key(p) == value]) for value in values]
        for wanted in named:
            groups += _question_groups(variant, wanted, [pair for pair in own if wanted.has(pair)])
    return Summary(run=run, evidence=evidence, groups=groups, pairs=pairs)


def _question_groups(variant: Mapping[str, Any], wanted: QuestionGroup, pairs: Sequence[PairResult]) -> list[Group]:
    if not pairs:
        return []
    files = sorted({_file(pair) for pair in pairs})
    split = [(f"{wanted.name}, {file}", [pair for pair in pairs if _file(pair) == file]) for file in files]
    named = [(wanted.name, pairs), *(split if len(files) > 1 else [])]
    return [_group(variant, "group", name, own) for name, own in named]


def _kind(pair: PairResult) -> str:
    return pair.kind


def _file(pair: PairResult) -> str:
    """Up to the first dot: `nano-1024.1.jsonl` and `nano-1024.2.jsonl` are one set in two files."""
    return pair.file.split(".", 1)[0]


def _group(variant: Mapping[str, Any], by: str, name: str, pairs: Sequence[PairResult]) -> Group:
    return Group(
        variant=variant["name"],
        axis=variant["axis"],
        value=variant["value"],
        by=by,
        name=name,
        pairs=len(pairs),
        metrics={metric: bootstrap([value(pair) for pair in pairs]) for metric, value in _METRICS.items()},
        worst_kl=max(pair.kl for pair in pairs),
        stops=(
            sum(pair.reuse.finish == "stop" for pair in pairs),
            sum(pair.recompute.finish == "stop" for pair in pairs),
        ),
        loops=(
            sum(pair.reuse.loop is not None for pair in pairs),
            sum(pair.recompute.loop is not None for pair in pairs),
        ),
        fanout=_added(pair.reuse.fanout for pair in pairs),
    )


def _added(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for k, count in enumerate(histogram):
            total[k] += count
    return tuple(total)
