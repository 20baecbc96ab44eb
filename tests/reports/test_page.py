"""The page and the table: whole, self-contained, escaped, and showing the figures of the reports."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.reports.scenes import fresh_plan, plan_of, response_of
from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.reports.compare import common_prefix, kl_divergence
from trt_redknot.reports.page import ArmText, PageInput, ReportError, render_page, write_page
from trt_redknot.reports.report import Ledger, RowCounts
from trt_redknot.reports.tables import arms_table, fanout_text

GEOMETRY = released_geometry("flash")
PROFILE = SplitProfile.default(GEOMETRY, "flash")
VOID = {"meta", "br", "rect", "line"}
HOSTILE = '<script>alert("x")</script>&amp;'


class Balanced(HTMLParser):
    """Checks that every element is closed in order, and collects names, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def scene(names: list[str] | None = None, *, admitted: bool = True) -> PageInput:
    plan = plan_of([200, 300, 250, 40], 11)
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1))
    other = logits + 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(2))
    return PageInput(
        reuse=response_of(
            GEOMETRY,
            PROFILE,
            plan if admitted else fresh_plan(plan.rows),
            admitted=admitted,
            tokens=[5, 6, 7],
            logits=other,
            ttft_s=1.25,
            reason=None if admitted else FallbackReason.CORRUPT_FILE,
            detail=None if admitted else HOSTILE,
        ),
        recompute=response_of(
            GEOMETRY, PROFILE, fresh_plan(plan.rows), admitted=False, tokens=[5, 6, 8, 9], logits=logits, ttft_s=5.0
        ),
        geometry=GEOMETRY,
        profile=PROFILE,
        policy=ReusePolicy(),
        network="DeepSeek-V4 Flash",
        tp_size=8,
        names=names,
        question=HOSTILE,
        texts=(ArmText(text=HOSTILE, pieces=["a", "b", "<b>"]), ArmText(text="plain", pieces=["a", "b", "c", "d"])),
    )


def parsed(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def test_page_is_whole_and_loads_nothing() -> None:
    html = render_page(scene(["one", "two", "three", HOSTILE]))
    page = parsed(html)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.names)
    assert page.links == []
    assert not re.search(r"(?:https?:)?//|@import|url\((?!#)", html)


def test_page_escapes_all_text() -> None:
    for page in (scene(["one", "two", "three", HOSTILE]), scene(admitted=False)):
        html = render_page(page)
        assert "<script" not in html
        assert HOSTILE in "".join(parsed(html).text)


def test_page_shows_the_figures_of_the_reports() -> None:
    page = scene()
    text = " ".join(" ".join(parsed(render_page(page)).text).split())
    report = page.reuse.report
    for ledger in (report.ledgers.logical_head_rows, report.ledgers.token_rows, report.ledgers.arithmetic):
        assert f"{100 * ledger.share:.2f} %" in text
        assert f"{ledger.saved:,} of {ledger.total:,}" in text
    assert "1.25 s and 5.00 s" in text
    assert f"{kl_divergence(page.recompute.first_logits, page.reuse.first_logits):.3g}" in text
    assert f"Protected {report.rows.protected:,} rows" in text
    assert f"Active {report.rows.active:,} rows" in text
    assert "agree in the first 2 tokens" in text
    assert "reuse admitted" in text
    assert f"{report.k_histogram[3]:,} pairs" in text


def test_page_of_a_refused_request_says_why() -> None:
    text = " ".join(parsed(render_page(scene(admitted=False))).text)
    assert "Reuse was not admitted: corrupt_file" in text


def test_two_different_requests_are_no_pair() -> None:
    page = scene()
    shorter = response_of(GEOMETRY, PROFILE, fresh_plan(9), admitted=False, tokens=[1], logits=torch.zeros(64))
    with pytest.raises(ValueError, match="not one request in both arms"):
        render_page(dataclasses.replace(page, recompute=shorter))
    with pytest.raises(ValueError, match="1 pieces of text for 3 tokens"):
        render_page(dataclasses.replace(page, texts=(ArmText(text="", pieces=["a"]), ArmText(text="", pieces=[]))))


def test_page_is_written_in_one_step_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    write_page(path, "one")
    write_page(path, "two")
    assert path.read_text(encoding="utf-8") == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    for refused in (path / "below a file" / "report.html", path.parent):
        with pytest.raises(ReportError, match="cannot be written"):
            write_page(refused, "three")
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["deep", "report.html"]


def shown(*arguments: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(arms_table(*arguments))  # type: ignore[arg-type]
    return stream.getvalue()


def test_table_has_every_measure_of_both_arms() -> None:
    page = scene()
    text = shown([page.reuse, page.recompute], ["[red]not markup", "plain"])
    for fragment in (
        "reuse admitted",
        "not asked for",
        f"{page.reuse.report.rows.protected:,}",
        f"{page.reuse.report.ledgers.arithmetic.share:.2%}".replace("%", " %"),
        "1.250 s",
        "5.000 s",
        "3: 66.7 %, 6: 33.3 %",
        "reference",
        "5 6 8 9",
        "[red]not markup",
    ):
        assert fragment in text


def test_table_of_one_response_has_no_divergence_and_a_refusal_its_reason() -> None:
    text = shown([scene(admitted=False).reuse])
    assert "KL" not in text
    assert "corrupt_file: <script>" in text


def test_fanout_text_of_nothing() -> None:
    assert fanout_text([]) == "-"
    assert fanout_text([0, 0, 0, 0, 0, 0, 0]) == "-"


@given(seed=st.integers(0, 10_000), size=st.integers(2, 50))
@settings(max_examples=50, deadline=None)
def test_kl_against_its_definition(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, size, generator=generator) * 4
    p, q = (each.double().softmax(-1).tolist() for each in logits)
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl_divergence(logits[0], logits[1]) == pytest.approx(expected, abs=1e-9)
    assert kl_divergence(logits[0], logits[0] + 3.0) == pytest.approx(0.0, abs=1e-9)


def test_kl_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="not finite"):
        kl_divergence(torch.tensor([0.0, float("nan")]), torch.zeros(2))
    with pytest.raises(ValueError, match="cannot be compared"):
        kl_divergence(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(
    ("one", "other", "same"), [([], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 4, 3], 1)]
)
def test_common_prefix(one: list[int], other: list[int], same: int) -> None:
    assert common_prefix(one, other) == same


def test_report_json_is_plain_and_complete() -> None:
    report = scene().reuse.report
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(data) == {field.name for field in dataclasses.fields(report)}
    assert data["ledgers"]["token_rows"]["share"] == report.ledgers.token_rows.share
    assert data["timings"]["stages"] == {"leading": 0.5}
    refused = scene(admitted=False).reuse.report.to_json()
    assert (refused["arm"], refused["fallback_reason"]) == ("recompute", "corrupt_file")


def test_a_report_cannot_claim_reuse_that_did_not_happen() -> None:
    report = scene().reuse.report
    with pytest.raises(AssertionError, match="admitted"):
        dataclasses.replace(report, arm="recompute")
    with pytest.raises(AssertionError, match="refused"):
        dataclasses.replace(report, fallback_reason=FallbackReason.TIMEOUT)
    with pytest.raises(AssertionError, match="partition"):
        RowCounts(total=3, protected=1, active=1, omitted=0, prefix=0)
    with pytest.raises(AssertionError, match="saved 3 of 2"):
        Ledger(saved=3, total=2)
