"""Tables of an evaluation as Markdown, for a documentation page. Every table names its class of evidence."""

from __future__ import annotations

from trt_redknot.evaluation.summary import ALL, Group, Summary
from trt_redknot.evaluation.tables import change, percent

_HEAD = (
    "pairs", "F1 reuse", "F1 recompute", "change of F1, points", "EM reuse", "EM recompute", "KL, nats",
    "same first token", "same tokens", "token-rows saved",
)  # fmt: skip


def overall_markdown(summary: Summary, axis: str) -> str:
    """One line a variant of the axis, then one a record that a variant left out."""
    table = _table(summary, axis, [(group.value, group) for group in summary.overall(axis)])
    variants = [variant["name"] for variant in summary.run["variants"] if variant["axis"] == axis]
    lines = [
        f"- Left out of {entry['variant']}: {entry['id']}: {entry['reason']}"
        for entry in summary.left_out
        if entry["variant"] in variants
    ]
    return "\n".join([table, *lines, ""]) if lines else table


def groups_markdown(summary: Summary, variant: str, by: str) -> str:
    """One line a kind of question, or a file, of one variant."""
    groups = [group for group in summary.groups if group.variant == variant and group.by in (by, ALL)]
    return _table(summary, by, [(group.name, group) for group in groups])


def summary_markdown(summary: Summary) -> str:
    """All tables of a summary: a variant's groups where there is only one variant, else one table an axis."""
    overall = summary.overall()
    if len(overall) > 1:
        return "\n".join(f"## {axis}\n\n{overall_markdown(summary, axis)}" for axis in summary.axes)
    return "\n".join(
        f"## By {by}\n\n{groups_markdown(summary, group.variant, by)}"
        for group in overall
        for by in dict.fromkeys(other.by for other in summary.groups if other.by != ALL)
    )


def _table(summary: Summary, first: str, rows: list[tuple[str, Group]]) -> str:
    lines = [
        f"Evidence: **{summary.evidence.value}**.",
        "",
        f"| {first} | {' | '.join(_HEAD)} |",
        f"|{'---|' * (len(_HEAD) + 1)}",
    ]
    for name, group in rows:
        m = group.metrics
        cells = [
            str(group.pairs), percent(m["f1_reuse"]), percent(m["f1_recompute"]), change(m["f1_change"]),
            percent(m["exact_reuse"]), percent(m["exact_recompute"]), f"{m['kl'].mean:.4f}", percent(m["top1"]),
            percent(m["agreement"]), percent(m["token_rows_saved"]),
        ]  # fmt: skip
        lines.append(f"| {name.replace('|', '/')} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
