"""The table that puts the answers of several arms side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from trt_redknot.reports.compare import kl_divergence
from trt_redknot.reports.report import Ledger, Report

if TYPE_CHECKING:
    from trt_redknot.engine.response import Response

_TOKENS_SHOWN = 16


def arms_table(responses: Sequence[Response], texts: Sequence[str] | None = None) -> Table:
    """One column a response: arm, admission, rows by class, the four ledgers, fanout, KL of the first logits, tokens.

    The KL divergence is against the first response that was asked to recompute, or had to; without one the row is left
    out.

    Args:
        texts: the answers as text, one a response.
    """
    table = Table(title="Arms", show_lines=False)
    table.add_column("measure", style="bold")
    for response in responses:
        table.add_column(_heading(response.report), justify="right", overflow="fold")
    for title, value in _MEASURES:
        table.add_row(title, *(value(response.report) for response in responses))
    recomputed = [each for each in responses if each.report.arm == "recompute"]
    reference = min(recomputed, key=lambda each: each.report.fallback_reason is not None, default=None)
    if reference is not None and len(responses) > 1:
        table.add_row("KL of first logits, nats", *(_kl(reference, response) for response in responses))
    table.add_section()
    table.add_row("tokens", *(_tokens(response.tokens) for response in responses))
    if texts is not None:
        table.add_row("text", *(escape(text) for text in texts))
    return table


def _heading(report: Report) -> str:
    return report.arm if report.fallback_reason is None else "reuse, refused"


def admission_text(report: Report) -> str:
    """`yes`, `not asked for`, or the reason for recomputation with its detail."""
    if report.admitted:
        return "yes"
    if report.fallback_reason is None:
        return "not asked for"
    detail = f": {report.fallback_detail}" if report.fallback_detail else ""
    return f"{report.fallback_reason.value}{detail}"


def fanout_text(histogram: Sequence[int]) -> str:
    """Share of (row, layer) pairs by number of experts run, as in `3: 41.2 %, 6: 58.8 %`."""
    total = sum(histogram)
    shares = (f"{k}: {count / total:.1%}" for k, count in enumerate(histogram) if count)
    return ", ".join(shares).replace("%", " %") if total else "-"


def _share(ledger: Ledger) -> str:
    return f"{ledger.share:.2%} of {ledger.total:,}".replace("%", " %")


def _kl(reference: Response, response: Response) -> str:
    return (
        "reference" if response is reference else f"{kl_divergence(reference.first_logits, response.first_logits):.3e}"
    )


def _tokens(tokens: Sequence[int]) -> str:
    shown = " ".join(map(str, tokens[:_TOKENS_SHOWN]))
    return f"{shown} (and {len(tokens) - _TOKENS_SHOWN} more)" if len(tokens) > _TOKENS_SHOWN else shown


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


_MEASURES: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("reuse admitted", lambda report: escape(admission_text(report))),
    ("rows", lambda report: f"{report.rows.total:,}"),
    ("rows protected", lambda report: f"{report.rows.protected:,}"),
    ("rows active", lambda report: f"{report.rows.active:,}"),
    ("rows omitted", lambda report: f"{report.rows.omitted:,}"),
    ("  of these in an exact prefix", lambda report: f"{report.rows.prefix:,}"),
    ("1 logical head-rows saved", lambda report: _share(report.ledgers.logical_head_rows)),
    ("2 token-rows saved", lambda report: _share(report.ledgers.token_rows)),
    ("3 arithmetic saved (multiply-adds)", lambda report: _share(report.ledgers.arithmetic)),
    ("4 time to first token", lambda report: _seconds(report.timings.ttft_s)),
    ("  admission", lambda report: _seconds(report.timings.admission_s)),
    ("  decode", lambda report: _seconds(report.timings.decode_s)),
    ("experts run", lambda report: fanout_text(report.k_histogram)),
)
