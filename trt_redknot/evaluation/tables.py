"""Tables of an evaluation for the terminal. Every title names the class of evidence."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from trt_redknot.evaluation.statistics import Interval
from trt_redknot.evaluation.summary import ALL, Group, Summary

_COLUMNS = (
    "pairs", "F1 reuse", "F1 recompute", "change of F1", "EM reuse", "EM recompute", "KL, nats", "same first token",
    "same tokens", "token-rows saved",
)  # fmt: skip


def summary_table(summary: Summary) -> Table:
    """One line a variant, over all of its pairs; intervals are 95 %, paired bootstrap."""
    table = _table(f"Reuse against recomputation ({summary.evidence.value})", "variant")
    for group in summary.overall():
        table.add_row(escape(group.variant), *_cells(group))
    return table


def detail_table(summary: Summary, variant: str) -> Table:
    """One line a kind of question and one a file, of one variant."""
    table = _table(f"{escape(variant)} by kind and file ({summary.evidence.value})", "group")
    for group in summary.groups:
        if group.variant == variant and group.by != ALL:
            table.add_row(escape(f"{group.by} {group.name}"), *_cells(group))
    return table


def answers_table(summary: Summary) -> Table:
    """How answers ended: by themselves, or in a repetition; and how many experts ran."""
    table = Table(title=f"Ends of answers, experts a row ({summary.evidence.value})")
    for column in ("variant", "stopped reuse / recompute", "repeating reuse / recompute", "mean experts", "worst KL"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for group in summary.overall():
        pairs = sum(group.fanout)
        mean = sum(k * count for k, count in enumerate(group.fanout)) / pairs if pairs else None
        table.add_row(
            escape(group.variant), f"{group.stops[0]} / {group.stops[1]} of {group.pairs}",
            f"{group.loops[0]} / {group.loops[1]}", "-" if mean is None else f"{mean:.2f}", f"{group.worst_kl:.2g}",
        )  # fmt: skip
    return table


def left_out_table(summary: Summary) -> Table | None:
    """One line a record that a variant left out, with the reason; None where there is none."""
    if not summary.left_out:
        return None
    table = Table(title=f"Left out ({summary.evidence.value})")
    for column in ("variant", "record", "reason"):
        table.add_column(column)
    for entry in summary.left_out:
        table.add_row(*(escape(entry[key]) for key in ("variant", "id", "reason")))
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    return table


def _cells(group: Group) -> list[str]:
    m = group.metrics
    return [
        str(group.pairs),
        percent(m["f1_reuse"]),
        percent(m["f1_recompute"]),
        change(m["f1_change"]),
        percent(m["exact_reuse"]),
        percent(m["exact_recompute"]),
        f"{m['kl'].mean:.4f}",
        percent(m["top1"]),
        percent(m["agreement"]),
        percent(m["token_rows_saved"]),
    ]


def percent(interval: Interval) -> str:
    return f"{interval.mean:.1%}"


def change(interval: Interval) -> str:
    """A difference in points with its interval."""
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
