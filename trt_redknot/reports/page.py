"""One self-contained HTML page about one request answered in both arms: no script, no font, no image from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.errors import RedKnotError
from trt_redknot.reports.compare import common_prefix, kl_divergence
from trt_redknot.reports.layermap import layer_bars, zone_spans
from trt_redknot.reports.report import Ledger
from trt_redknot.reports.rowmap import CLASS_NAMES, PARTS, class_codes, reason_counts, row_map, segment_names
from trt_redknot.reports.tables import admission_text
from trt_redknot.request.rows import RowPlan
from trt_redknot.textfile import replace_text

if TYPE_CHECKING:
    from trt_redknot.engine.response import Response

TEMPLATE = "page.html.jinja"


class ReportError(RedKnotError):
    """A report cannot be written."""


@dataclass(frozen=True, kw_only=True)
class ArmText:
    """An answer as people read it: its text, and the text of each token."""

    text: str
    pieces: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PageInput:
    """Everything a page shows.

    Attributes:
        names: what to call each segment of the reuse arm's plan; None: artifact ids.
        question: what was asked, as text.
        texts: the answers as text, reuse arm first; None: token ids are shown.
        network: what the network is called, for the heading.
    """

    reuse: Response
    recompute: Response
    geometry: ModelGeometry
    profile: SplitProfile
    policy: ReusePolicy
    network: str
    tp_size: int
    names: Sequence[str] | None = None
    question: str | None = None
    texts: tuple[ArmText, ArmText] | None = None


@dataclass(frozen=True, kw_only=True)
class _Token:
    text: str
    same: bool


def render_page(page: PageInput) -> str:
    """The page as HTML. All text is escaped.

    Raises:
        ValueError: the two responses are not one request in both arms.
    """
    plan, reuse, recompute = page.reuse.plan, page.reuse.report, page.recompute.report
    if recompute.arm != "recompute" or recompute.rows.total != reuse.rows.total:
        raise ValueError(f"not one request in both arms: {reuse.rows.total} rows, {recompute.rows.total} rows")
    environment = Environment(
        loader=PackageLoader("trt_redknot.reports", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    bars = layer_bars(page.geometry, page.profile, plan, page.policy.epilogue if reuse.admitted else "full")
    rows = row_map(plan)
    return environment.get_template(TEMPLATE).render(
        page=page,
        reuse=reuse,
        recompute=recompute,
        admission=admission_text(reuse),
        kl=kl_divergence(page.recompute.first_logits, page.reuse.first_logits),
        same_tokens=common_prefix(page.reuse.tokens, page.recompute.tokens),
        map=rows,
        map_parts=PARTS,
        class_names=CLASS_NAMES,
        segments=_segments(plan, page.names),
        classes=_class_counts(plan),
        reasons=reason_counts(plan),
        bars=bars,
        zones=zone_spans(bars),
        ledgers=_ledgers(reuse.ledgers.logical_head_rows, reuse.ledgers.token_rows, reuse.ledgers.arithmetic),
        fanout=[(k, count) for k, count in enumerate(reuse.k_histogram) if k > 0],
        answers=_answers(page),
    )


def write_page(path: Path, html: str) -> None:
    """Write the page in one step: a reader sees the old file or the whole new one.

    Raises:
        ReportError: the file cannot be written.
    """
    try:
        replace_text(path, html)
    except OSError as error:
        raise ReportError(
            f"the report cannot be written: {error.strerror or error}", path=path, remedy="Name another file."
        ) from error


def _ledgers(head_rows: Ledger, token_rows: Ledger, arithmetic: Ledger) -> list[tuple[str, str, Ledger]]:
    return [
        ("Logical head-rows", "Local heads of reusable layers whose rows came from artifacts", head_rows),
        ("Physical token-rows", "(layer, row) pairs that did not run", token_rows),
        ("Analytic arithmetic", "multiply-adds of the major operators not executed", arithmetic),
    ]


def _class_counts(plan: RowPlan) -> dict[str, int]:
    codes = class_codes(plan)
    return {name: int((codes == code).sum()) for code, name in enumerate(CLASS_NAMES)}


def _segments(plan: RowPlan, names: Sequence[str] | None) -> list[dict[str, object]]:
    codes = class_codes(plan)
    return [
        {
            "name": name,
            "kind": segment.kind.value,
            "start": segment.start,
            "length": segment.length,
            "edits": len(segment.edits),
            "counts": [
                (label, int((codes[segment.start : segment.stop] == code).sum()))
                for code, label in enumerate(CLASS_NAMES)
            ],
        }
        for segment, name in zip(plan.segments, segment_names(plan.segments, names), strict=True)
    ]


def _answers(page: PageInput) -> list[dict[str, object]]:
    answers: list[dict[str, object]] = []
    responses = (page.reuse, page.recompute)
    same = common_prefix(page.reuse.tokens, page.recompute.tokens)
    for index, response in enumerate(responses):
        ids = [str(token) for token in response.tokens]
        pieces = ids if page.texts is None else page.texts[index].pieces
        if len(pieces) != len(ids):
            raise ValueError(f"{len(pieces)} pieces of text for {len(ids)} tokens")
        answers.append(
            {
                "arm": response.report.arm,
                "asked": "reuse" if index == 0 else "recompute",
                "text": None if page.texts is None else page.texts[index].text,
                "tokens": [_Token(text=piece, same=place < same) for place, piece in enumerate(pieces)],
                "ids": " ".join(ids),
                "finish": response.finish_reason,
            }
        )
    return answers
