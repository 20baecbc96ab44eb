"""Charts as geometry: points, intervals, ticks in the units of an SVG. The page's template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.statistics import Interval
from trt_redknot.evaluation.summary import Summary

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 16, 44
_STEPS = (1, 2, 2.5, 5, 10)
_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A mean at (x, y) with its interval from `low` to `high` (in pixels), and what to say about it."""

    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series; `line` is the path through its marks."""

    name: str
    marks: Sequence[Mark]
    line: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure.

    Attributes:
        labels: (x, text) below the axis.
        ticks: (y, text) beside it.
    """

    title: str
    evidence: Evidence
    unit: str
    lines: Sequence[Line]
    labels: Sequence[tuple[float, str]]
    ticks: Sequence[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


def chart(
    title: str, evidence: Evidence, unit: str, labels: Sequence[str], series: Sequence[tuple[str, Sequence[Interval]]]
) -> Chart:
    """A chart of series that share their labels; every series has a value for each label.

    Raises:
        ValueError: nothing to draw, or a series of another length.
    """
    if not labels or any(len(values) != len(labels) for _, values in series):
        raise ValueError("every series needs a value for each label, at least one")
    values = [value for _, intervals in series for value in intervals]
    ticks = _ticks(min(value.low for value in values), max(value.high for value in values))
    low, high = ticks[0], ticks[-1]

    def across(index: int) -> float:
        span = WIDTH - _LEFT - _RIGHT
        return round(_LEFT + span * (index + 0.5) / len(labels), 1)

    def up(value: float) -> float:
        return round(HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low), 1)

    lines = []
    for name, intervals in series:
        marks = [
            Mark(x=across(index), y=up(value.mean), low=up(value.low), high=up(value.high),
                 text=f"{name}, {labels[index]}: {value.mean:.4g} [{value.low:.4g}, {value.high:.4g}], n={value.count}")
            for index, value in enumerate(intervals)
        ]  # fmt: skip
        path = " ".join(f"{'L' if index else 'M'}{mark.x} {mark.y}" for index, mark in enumerate(marks))
        lines.append(Line(name=name, marks=marks, line=path))
    return Chart(
        title=title,
        evidence=evidence,
        unit=unit,
        lines=lines,
        labels=[(across(index), label) for index, label in enumerate(labels)],
        ticks=[(up(value), f"{value:g}") for value in ticks],
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round values from at or below `low` to at or above `high`."""
    largest = max(abs(low), abs(high))
    if high - low < max(1e-9, 1e-4 * largest):
        # Values that are all but one have no range of their own, and ticks would not tell them apart.
        pad = max(1e-6, 0.1 * largest)
        low, high = low - pad, high + pad
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in _STEPS if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 12) for index in range(first, max(last, first + 1) + 1)]


def axis_charts(summary: Summary, axis: str) -> list[Chart]:
    """Scores, KL and savings of the variants of an axis."""
    groups = summary.overall(axis)
    labels = [group.value for group in groups]

    def of(metric: str, factor: float = 1.0) -> list[Interval]:
        return [
            Interval(mean=m.mean * factor, low=m.low * factor, high=m.high * factor, count=m.count)
            for m in (group.metrics[metric] for group in groups)
        ]

    return [
        chart(f"{axis}: F1", summary.evidence, "%", labels,
              [("reuse", of("f1_reuse", 100)), ("recompute", of("f1_recompute", 100))]),
        chart(f"{axis}: exact match", summary.evidence, "%", labels,
              [("reuse", of("exact_reuse", 100)), ("recompute", of("exact_recompute", 100))]),
        chart(f"{axis}: KL of the first token", summary.evidence, "nats", labels, [("KL", of("kl"))]),
        chart(f"{axis}: saved", summary.evidence, "%", labels,
              [("token-rows", of("token_rows_saved", 100)), ("arithmetic", of("arithmetic_saved", 100))]),
    ]  # fmt: skip
