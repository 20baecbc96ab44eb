"""Charts as SVG text, for the HTML pages: bars by group, lines with intervals, stacked spans. No script, no font.

Every chart has a title and a note under it (where the values come from), and names its axes. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

COLOURS = ("#2f6f9f", "#d9822b", "#4a9d5b", "#b04a5a", "#7a5ea8", "#8c8c3a", "#3aa0a0", "#a86b4b", "#777777")
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 64, 16, 40, 56
_LINE = 18


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What every chart says about itself.

    Attributes:
        note: under the title; the class of evidence, at least.
        unit: of the values, on their axis.
    """

    title: str
    note: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value and the interval it lies in.

    Attributes:
        hint: shown when it is pointed at, after the value.
    """

    value: float
    low: float
    high: float
    hint: str = ""


def bars(
    frame: Frame, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], *, height: int = 320
) -> Markup:
    """Groups of bars, one bar a series; None leaves a gap. The value is written over each bar."""
    top = _ceiling(max((value for values in series.values() for value in values if value is not None), default=1.0))
    plot = _Plot(frame, height, (0.0, float(len(groups))), (0.0, top), list(series))
    plot.value_axis([top * step / 4 for step in range(5)])
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        for group, value in enumerate(values):
            if value is None:
                continue
            left = plot.x(group + 0.1 + number * width)
            plot.box(
                left,
                plot.y(value),
                plot.x(group + 0.1 + (number + 1) * width) - 1,
                plot.y(0.0),
                number,
                f"{name}, {groups[group]}: {value:.3g} {frame.unit}",
            )
            plot.text(
                (left + plot.x(group + 0.1 + (number + 1) * width)) / 2,
                plot.y(value) - 4,
                f"{value:.2f}",
                "middle",
                small=True,
            )
    for group, label in enumerate(groups):
        plot.text(plot.x(group + 0.5), plot.bottom + 16, label, "middle")
    return plot.done()


def lines(
    frame: Frame,
    labels: Sequence[str],
    series: Mapping[str, Sequence[Point | None]],
    *,
    from_zero: bool = False,
    height: int = 320,
) -> Markup:
    """One line a series through its points, one a label, with their intervals; None leaves a point out.

    Args:
        from_zero: the axis starts at zero; else below the lowest end of an interval.

    Raises:
        ValueError: a series has not a point, or None, for each label.
    """
    if any(len(points) != len(labels) for points in series.values()):
        raise ValueError("every series needs a point, or None, for each label")
    ends = [end for points in series.values() for point in points if point for end in (point.low, point.high)]
    ticks = _ticks(0.0 if from_zero else min(ends, default=0.0), max(ends, default=1.0))
    plot = _Plot(frame, height, (0.0, float(max(1, len(labels)))), (ticks[0], ticks[-1]), list(series))
    plot.value_axis(ticks)
    for index, label in enumerate(labels):
        plot.text(plot.x(index + 0.5), plot.bottom + 16, label, "middle")
    for number, (name, points) in enumerate(series.items()):
        there = [(plot.x(index + 0.5), labels[index], point) for index, point in enumerate(points) if point is not None]
        plot.path([(x, plot.y(point.value)) for x, _, point in there], number)
        for x, label, point in there:
            plot.path([(x, plot.y(point.low)), (x, plot.y(point.high))], number)
            hint = f"{name}, {label}: {point.value:.4g} [{point.low:.4g}, {point.high:.4g}] {frame.unit} {point.hint}"
            plot.dot(x, plot.y(point.value), number, hint.rstrip())
    return plot.done()


def spans(frame: Frame, rows: Mapping[str, Mapping[str, float]]) -> Markup:
    """One bar a row, cut into its parts in the order given; equal names have equal colours."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    total = _ceiling(max((math.fsum(parts.values()) for parts in rows.values()), default=1.0))
    legend_lines = -(-len(names) // 5)
    plot = _Plot(
        frame,
        _TOP + _BOTTOM + 34 * len(rows) + _LINE * legend_lines,
        (0.0, total),
        (0.0, float(len(rows))),
        names,
        left=150,
    )
    for row, (label, parts) in enumerate(rows.items()):
        start = 0.0
        y = plot.y(len(rows) - row) + 4
        for name, value in parts.items():
            plot.box(
                plot.x(start),
                y,
                plot.x(start + value),
                y + 22,
                names.index(name),
                f"{label}, {name}: {value:.4g} {frame.unit}",
            )
            start += value
        plot.text(plot.left - 6, y + 15, label, "end")
        plot.text(plot.x(start) + 4, y + 15, f"{start:.3g}", "start", small=True)
    plot.text((plot.left + plot.right) / 2, plot.bottom + 16, frame.unit, "middle")
    return plot.done()


class _Plot:
    """Marks collected in pixels; `x` and `y` turn values into them."""

    def __init__(
        self, frame: Frame, height: int, xs: tuple[float, float], ys: tuple[float, float], names: Sequence[str],
        *, left: int = _LEFT,
    ) -> None:  # fmt: skip
        self.left, self.right = left, _WIDTH - _RIGHT
        self._legend_lines = -(-len(names) // 5)
        self.bottom = height - _BOTTOM
        self._top = _TOP + _LINE * self._legend_lines + 14
        self._frame, self._height, self._xs, self._ys, self._names = frame, height, xs, ys, names
        self._marks: list[Markup] = []

    def x(self, value: float) -> float:
        low, high = self._xs
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self._ys
        return self.bottom - (value - low) / (high - low) * (self.bottom - self._top)

    def value_axis(self, ticks: Sequence[float]) -> None:
        for value in ticks:
            y = self.y(value)
            self._marks.append(
                Markup('<path d="M{:.1f} {:.1f}H{:.1f}" stroke="#ddd"/>').format(self.left, y, self.right)
            )
            self.text(self.left - 6, y + 4, f"{value:g}", "end", small=True)
        self.text(self.left, self._top - 6, self._frame.unit, "end", small=True)

    def box(self, left: float, top: float, right: float, bottom: float, colour: int, hint: str) -> None:
        self._marks.append(
            Markup(
                '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"><title>{}</title></rect>'
            ).format(left, top, max(0.0, right - left), max(0.0, bottom - top), COLOURS[colour % len(COLOURS)], hint)
        )

    def dot(self, x: float, y: float, colour: int, hint: str) -> None:
        self._marks.append(
            Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"><title>{}</title></circle>').format(
                x, y, COLOURS[colour % len(COLOURS)], hint
            )
        )

    def path(self, points: Sequence[tuple[float, float]], colour: int) -> None:
        route = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._marks.append(
            Markup('<path d="M{}" fill="none" stroke="{}" stroke-width="1.5"/>').format(
                route, COLOURS[colour % len(COLOURS)]
            )
        )

    def text(self, x: float, y: float, text: str, anchor: str, *, small: bool = False) -> None:
        self._marks.append(
            Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" font-size="{}">{}</text>').format(
                x, y, anchor, 10 if small else 12, text
            )
        )

    def done(self) -> Markup:
        for number, name in enumerate(self._names):
            x, y = 8 + number % 5 * (_WIDTH - 16) / 5, _TOP - 2 + _LINE * (number // 5)
            self.box(x, y, x + 10, y + 10, number, name)
            self.text(x + 14, y + 9, name, "start", small=True)
        head = Markup('<text x="8" y="16" font-size="14" font-weight="bold">{}</text>').format(self._frame.title)
        note = Markup('<text x="8" y="32" font-size="11" fill="#555">{}</text>').format(self._frame.note)
        return Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
            'aria-label="{}" '
            'font-family="sans-serif">{}{}{}</svg>'
        ).format(
            _WIDTH,
            self._height,
            _WIDTH,
            self._height,
            escape(self._frame.title),
            head,
            note,
            Markup("").join(self._marks),
        )


def _ceiling(value: float) -> float:
    """The next number above that reads well on an axis."""
    if not math.isfinite(value) or value < 1e-12:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power
        for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10)
        if step * power >= value * 1.02 or step == 10
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round values from at or below `low` to at or above `high`, about five steps."""
    largest = max(abs(low), abs(high))
    if high - low < max(1e-9, 1e-4 * largest):
        # Values that are all but one have no range of their own, and ticks would not tell them apart.
        pad = max(1e-6, 0.1 * largest)
        low, high = low if low == 0.0 else low - pad, high + pad
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 12) for index in range(first, max(last, first + 1) + 1)]
