"""Summaries, tables, charts and the page: what they say is what the pairs say, with its evidence class."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from tests.evaluation.samples import arm, pair, run_of
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import RequestError
from trt_redknot.evaluation.charts import figures
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.markdown import summary_markdown
from trt_redknot.evaluation.page import render_evaluation
from trt_redknot.evaluation.summary import QuestionGroup, Summary, summarise
from trt_redknot.evaluation.tables import answers_table, detail_table, summary_table
from trt_redknot.evaluation.variants import sweep


def swept(evidence: Evidence = Evidence.MEASURED) -> Summary:
    variants = sweep(ReusePolicy(), ["budget", "epilogue"], multiple=32)
    pairs = [
        pair(
            variant=variant.name, id=f"r{index}", kind=("single", "override")[index % 2], kl=0.1 * index,
            reuse=arm(f1=index / 3, exact=float(index == 3), loop=4 if index == 1 else None),
            recompute=arm(finish="length"),
        )
        for variant in variants
        for index in range(4)
    ]  # fmt: skip
    return summarise(run_of(variants), pairs, evidence)


def text_of(*tables: object) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(*tables)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_summary_counts_what_the_pairs_say() -> None:
    summary = swept()
    assert summary.axes == ["budget", "epilogue"]
    groups = summary.overall("budget")
    assert [group.value for group in groups] == ["0%", "10%", "20%", "25%", "50%", "100%"]
    first = groups[0]
    assert first.pairs == 4
    assert first.metrics["f1_reuse"].mean == pytest.approx(0.5)
    assert first.metrics["f1_change"].mean == pytest.approx(-0.5)
    assert first.metrics["exact_reuse"].mean == 0.25
    assert first.worst_kl == pytest.approx(0.3)
    assert (first.stops, first.loops) == ((4, 0), (1, 0))
    assert first.fanout == (0, 0, 0, 20, 12, 0, 8)
    kinds = [group for group in summary.groups if group.variant == first.variant and group.by == "kind"]
    assert {group.name: group.metrics["kl"].mean for group in kinds} == pytest.approx({"single": 0.1, "override": 0.2})


def test_groups_of_questions_split_the_pairs() -> None:
    asked = {"a": "Who is the chief of Mara?", "b": "Where is Mara?", "c": "Whose chief is Tom?"}
    pairs = [
        pair(id=f"{name}{length}", file=f"nano-{length}.jsonl", question=asked[name], kl=float(kl))
        for kl, (length, name) in enumerate((length, name) for length in (1, 2) for name in asked)
    ]
    named = [QuestionGroup.parse("with", r"\bchief\b"), QuestionGroup.parse("without", r"!\bchief\b")]
    named.append(QuestionGroup.parse("nobody", "Anna"))
    summary = summarise(run_of(), pairs, Evidence.ARCHIVED, named)
    groups = {group.name: group for group in summary.groups if group.by == "group"}
    assert {name: group.pairs for name, group in groups.items()} == {
        "with": 4, "with, nano-1": 2, "with, nano-2": 2, "without": 2, "without, nano-1": 1, "without, nano-2": 1,
    }  # fmt: skip
    assert groups["with"].metrics["kl"].mean == pytest.approx((0 + 2 + 3 + 5) / 4)
    assert groups["without, nano-2"].metrics["kl"].mean == 4
    assert "group without, nano-2" in text_of(detail_table(summary, "policy"))
    assert "| without, nano-2 | 1 |" in summary_markdown(summary)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match=r"group chiefs is ill-formed.*chief\("):
        QuestionGroup.parse("chiefs", "!chief(")


def test_all_charts_have_names_for_files() -> None:
    found = figures(swept(Evidence.ARCHIVED))
    assert len(found) == 8
    assert "archived" in found["budget-kl-of-the-first-token"]
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in found)


def test_a_variant_without_results_yet_is_left_out() -> None:
    variants = sweep(ReusePolicy(), ["epilogue"], multiple=32)
    summary = summarise(run_of(variants), [pair(variant="epilogue=active")], Evidence.MEASURED)
    assert [group.variant for group in summary.overall()] == ["epilogue=active"]


@pytest.mark.parametrize("evidence", list(Evidence))
def test_every_table_and_figure_names_its_evidence(evidence: Evidence) -> None:
    summary = swept(evidence)
    for table in (summary_table(summary), detail_table(summary, "budget=10%"), answers_table(summary)):
        assert f"({evidence.value})" in text_of(table)
    page = render_evaluation(summary, "Title")
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) == 8
    for figure in figures:
        assert f">{evidence.value}; " in figure
    for heading in re.findall(r"<h2>(.*?)</h2>", page):
        assert heading == "Figures" or evidence.value in heading
    assert summary.to_json()["evidence"] == evidence.value
    assert evidence.sentence in page


def test_the_page_shows_both_answers_and_escapes_them() -> None:
    hostile = "<script>alert('x')</script>"
    pairs = [
        pair(id="same", kl=3.0),
        pair(id="differs", question=hostile, reuse=arm(text=hostile, loop=2), recompute=arm(text="a & b")),
    ]
    page = render_evaluation(summarise(run_of(), pairs, Evidence.MEASURED), hostile)
    assert "<script>" not in page
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 4
    assert "a &amp; b" in page
    assert "repeats every 2 tokens" in page
    # Answers that differ come first.
    assert page.index("policy, differs") < page.index("policy, same")
    assert not re.search(r"(?:src|href)\s*=|url\(|@import", page)


class Balance(HTMLParser):
    """Checks that every element is closed, in order."""

    void = ("meta", "br", "hr", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed() -> None:
    parser = Balance()
    parser.feed(render_evaluation(swept(), "Title"))
    assert parser.open == []
