"""`doctor`: what this machine has and lacks, and what to do about it."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from trt_redknot.cli.checks import Check, Status, run_checks
from trt_redknot.cli.output import Output

_STYLES = {Status.OK: "[green]ok[/]", Status.WARN: "[yellow]warn[/]", Status.FAIL: "[red]fail[/]"}


@click.command(
    epilog="""\b
Examples:
  python -m trt_redknot doctor
  python -m trt_redknot doctor --store /data/artifacts --json

A fail is something that the CPU default needs, and makes the exit status 1. A warn is something that only a GPU,
several ranks or development need.
""",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Artifact store whose folder, locks and content are checked too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(store: Path | None, as_json: bool) -> None:
    """Check this machine and say what to do about what is missing."""
    checks = run_checks(store)
    out = Output()
    if as_json:
        out.json({"checks": [check.to_json() for check in checks], "ready": not _failed(checks)})
    else:
        out.show(_table(checks))
    if _failed(checks):
        sys.exit(1)


def _failed(checks: list[Check]) -> bool:
    return any(check.status is Status.FAIL for check in checks)


def _table(checks: list[Check]) -> Table:
    table = Table(title="trt_redknot doctor")
    for column in ("check", "status", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, _STYLES[check.status], escape(check.found), escape(check.remedy))
    return table
