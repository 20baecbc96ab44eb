"""Figures of an evaluation: scores, KL and savings of the variants of an axis."""

from __future__ import annotations

from markupsafe import Markup

from trt_redknot.evaluation.statistics import Interval
from trt_redknot.evaluation.summary import Summary
from trt_redknot.reports.charts import Frame, Point, lines

# Charts of an axis: title, unit, factor from metric to unit, metrics by series.
_CHARTS: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("F1", "%", 100.0, {"reuse": "f1_reuse", "recompute": "f1_recompute"}),
    ("exact match", "%", 100.0, {"reuse": "exact_reuse", "recompute": "exact_recompute"}),
    ("KL of the first token", "nats", 1.0, {"KL": "kl"}),
    ("saved", "%", 100.0, {"token-rows": "token_rows_saved", "arithmetic": "arithmetic_saved"}),
)


def axis_charts(summary: Summary, axis: str) -> list[Markup]:
    """One chart a kind of figure, over the variants of `axis`; each names its class of evidence."""
    groups = summary.overall(axis)
    labels = [group.value for group in groups]
    return [
        lines(
            Frame(title=f"{axis}: {title}", note=f"{summary.evidence.value}; intervals of 95 %", unit=unit),
            labels,
            {name: [point(group.metrics[metric], factor) for group in groups] for name, metric in metrics.items()},
        )
        for title, unit, factor, metrics in _CHARTS
    ]


def figures(summary: Summary) -> dict[str, Markup]:
    """The charts of all axes as SVG by a name for a file: axis and kind of figure."""
    return {
        f"{axis}-{title.lower().replace(' ', '-')}": chart
        for axis in summary.axes
        for (title, *_), chart in zip(_CHARTS, axis_charts(summary, axis), strict=True)
    }


def point(interval: Interval, factor: float) -> Point:
    """A mean with its interval, in another unit."""
    return Point(
        value=interval.mean * factor, low=interval.low * factor, high=interval.high * factor, hint=f"n={interval.count}"
    )
