"""Charts are well-formed, escape what they are given, and draw what they are given: read back from the SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.reports.charts import Frame, Point, bars, lines, spans

FRAME = Frame(title="A <b> & 'c'", note="measured", unit="s")
NAMESPACE = "{http://www.w3.org/2000/svg}"
VALUES = st.just(0.0) | st.floats(1e-3, 1e6)
NAMES = st.text("abc<>&\"'", min_size=1, max_size=5)


def read(chart: str) -> ET.Element:
    return ET.fromstring(str(chart))


def hints(chart: str) -> list[tuple[ET.Element, str]]:
    return [
        (mark, mark.findtext(f"{NAMESPACE}title", ""))
        for mark in read(chart)
        if mark.find(f"{NAMESPACE}title") is not None
    ]


@given(series=st.dictionaries(NAMES, st.lists(st.none() | VALUES, min_size=3, max_size=3), min_size=1, max_size=7))
def test_bars_are_as_high_as_their_values(series: dict[str, list[float | None]]) -> None:
    chart = bars(FRAME, ["x", "y", "z"], series)
    boxes = [(float(mark.get("height", "nan")), hint) for mark, hint in hints(chart) if ", " in hint and ":" in hint]
    drawn = [value for values in series.values() for value in values if value is not None]
    assert len(boxes) == len(drawn)
    highest = max(drawn, default=0.0)
    tallest = max((height for height, _ in boxes), default=0.0)
    for value, (height, _) in zip(drawn, boxes, strict=True):
        assert height == pytest.approx(value / highest * tallest if highest else 0.0, abs=0.2)


WIDTHS = st.floats(0, 1e3)


@given(values=st.lists(st.tuples(st.floats(-1e6, 1e6), WIDTHS, WIDTHS) | st.none(), min_size=1, max_size=9))
def test_lines_keep_order_and_stay_inside(values: list[tuple[float, float, float] | None]) -> None:
    points = [None if v is None else Point(value=v[0], low=v[0] - v[1], high=v[0] + v[2]) for v in values]
    chart = lines(FRAME, [str(index) for index in range(len(values))], {"one": points})
    dots = [
        (float(mark.get("cx", "nan")), float(mark.get("cy", "nan")))
        for mark, _ in hints(chart)
        if mark.tag.endswith("circle")
    ]
    assert [x for x, _ in dots] == sorted(x for x, _ in dots)
    heights = [point.value for point in points if point is not None]
    assert len(dots) == len(heights)
    for (_, one), (_, two), left, right in zip(dots, dots[1:], heights, heights[1:], strict=False):
        assert (one - two) * (left - right) <= 0.2 * abs(left - right)
    height = float(read(chart).get("height", "nan"))
    assert all(0 <= y <= height for _, y in dots)
    ticks = [text.text for text in read(chart).iter(f"{NAMESPACE}text") if text.get("text-anchor") == "end"][1:]
    assert len(ticks) == len(set(ticks)) >= 2


def test_lines_of_uneven_series_are_refused() -> None:
    with pytest.raises(ValueError, match="for each label"):
        lines(FRAME, ["a", "b"], {"one": [Point(value=1, low=1, high=1)]})


def test_spans_stand_end_to_end_and_share_colours() -> None:
    chart = spans(FRAME, {"first": {"a": 1.0, "b": 2.0}, "second": {"b": 1.5, "c": 0.5}})
    marks = [(mark, hint) for mark, hint in hints(chart) if ":" in hint]
    boxes = {hint.split(":")[0]: mark for mark, hint in marks}
    end = float(boxes["first, a"].get("x", "0")) + float(boxes["first, a"].get("width", "0"))
    assert end == pytest.approx(float(boxes["first, b"].get("x", "0")), abs=0.2)
    assert boxes["first, b"].get("fill") == boxes["second, b"].get("fill")
    assert float(boxes["first, b"].get("width", "0")) == pytest.approx(
        2 * float(boxes["first, a"].get("width", "0")), abs=0.2
    )


def test_nothing_to_draw_is_a_chart_all_the_same() -> None:
    for chart in (bars(FRAME, [], {}), lines(FRAME, [], {}), spans(FRAME, {})):
        assert read(chart).tag == f"{NAMESPACE}svg"
        assert "A &lt;b&gt; &amp; &#39;c&#39;" in chart
        assert not re.search(r"nan|inf", str(chart))
