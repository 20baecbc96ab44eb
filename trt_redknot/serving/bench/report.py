"""A bench's figures as a table and as a page with charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from trt_redknot.errors import StoreError
from trt_redknot.reports.charts import Frame, Point, lines
from trt_redknot.serving.bench.records import Arm, Loop
from trt_redknot.serving.bench.statistics import ArmFigures, Interval, LevelFigures
from trt_redknot.textfile import replace_text

_Figure = Callable[[ArmFigures], Point | None]


def table(figures: Sequence[LevelFigures], objective: str) -> Table:
    """One row for an arm at a level. Times in milliseconds; brackets are intervals of 95 %."""
    shown = Table(title=f"times in ms; goodput: requests/s with {objective}")
    for name in ("level", "arm", "done", "TTFT p50", "p99", "TPOT p50", "p99", "latency p50", "p99", "tokens/s",
                 "goodput", "TTFT ratio"):  # fmt: skip
        left = name in ("level", "arm")
        shown.add_column(name, justify="left" if left else "right", overflow="fold")
    for level in figures:
        for arm in level.arms:
            ratio = _ratio(level) if arm.arm is Arm.REUSE else ""
            shown.add_row(
                f"{level.level.loop} {level.level.name}", arm.arm.value, f"{arm.completed}/{arm.sent}",
                _range(arm.ttft_s, "p50").replace(" ", "\n"), _one(arm.ttft_s, "p99"), _one(arm.tpot_s, "p50"),
                _one(arm.tpot_s, "p99"), _one(arm.latency_s, "p50"), _one(arm.latency_s, "p99"),
                f"{arm.tokens_a_second:.1f}", f"{arm.goodput:.2f}", ratio.replace(" (", "\n("),
            )  # fmt: skip
    return shown


def _ratio(level: LevelFigures) -> str:
    ratio = level.ttft_ratio
    return "none, see below" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _one(figures: Mapping[str, Interval], name: str) -> str:
    return _milliseconds(figures[name].value) if name in figures else "-"


def _range(figures: Mapping[str, Interval], name: str) -> str:
    if name not in figures:
        return "-"
    found = figures[name]
    return f"{_milliseconds(found.value)} ({_milliseconds(found.low)}-{_milliseconds(found.high)})"


def _milliseconds(seconds: float) -> str:
    """Four digits or more where there are more: what a measurement can carry."""
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def page(figures: Sequence[LevelFigures], header: Mapping[str, object], objective: str) -> str:
    """An HTML page without outside parts."""
    environment = Environment(
        loader=PackageLoader("trt_redknot.serving.bench", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    charts = []
    for loop in Loop:
        chosen = [level for level in figures if level.level.loop is loop]
        if chosen:
            charts += [
                _chart(chosen, f"{loop} loop: time to first token, 50 %", "ms", lambda arm: _in_ms(arm.ttft_s, "p50")),
                _chart(chosen, f"{loop} loop: time to first token, 99 %", "ms", lambda arm: _in_ms(arm.ttft_s, "p99")),
                _chart(chosen, f"{loop} loop: time a token, 50 %", "ms", lambda arm: _in_ms(arm.tpot_s, "p50")),
                _chart(chosen, f"{loop} loop: goodput", "requests/s",
                       lambda arm: Point(value=arm.goodput, low=arm.goodput, high=arm.goodput)),
            ]  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        figures=figures, header=header, objective=objective, charts=charts, ratio=_ratio, one=_one, span=_range,
    )  # fmt: skip


def write_page(path: Path, content: str) -> None:
    """Raises StoreError where the page cannot be written."""
    try:
        replace_text(path, content)
    except OSError as error:
        raise StoreError(f"the page cannot be written: {error.strerror or error}", path=path) from error


def _in_ms(figures: Mapping[str, Interval], name: str) -> Point | None:
    found = figures.get(name)
    return None if found is None else Point(value=found.value * 1e3, low=found.low * 1e3, high=found.high * 1e3)


def _chart(levels: Sequence[LevelFigures], title: str, unit: str, figure: _Figure) -> Markup:
    """Both arms over the levels."""
    series = {
        kind.value: [next((figure(arm) for arm in level.arms if arm.arm is kind), None) for level in levels]
        for kind in Arm
    }
    frame = Frame(title=title, note="measured; bootstrap intervals of 95 %", unit=unit)
    return lines(frame, [level.level.name for level in levels], series, from_zero=True)
