"""`run/evaluate.py projections`: planning models, beside measured points where a bench file has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click
from rich.table import Table

from trt_redknot.cli.numbers import FiniteRange
from trt_redknot.cli.output import Output
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.profile import SplitProfile
from trt_redknot.config.released import released_geometry
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.measured import read_measured

if TYPE_CHECKING:
    from trt_redknot.evaluation.planning import Check, Projection

# The arms of run/bench_ttft.py by name, from its tail.
_ARMS: dict[str, Callable[[int], ReusePolicy]] = {
    "full, budget 10%": lambda tail: ReusePolicy(budget=0.10, tail=tail, epilogue="full"),
    "active, budget 10%": lambda tail: ReusePolicy(budget=0.10, tail=tail, epilogue="active"),
    "fast": lambda _: ReusePolicy(budget=0.05, tail=4096, epilogue="active"),
}


def projections_command() -> click.Command:
    """The click command."""

    @click.command("projections")
    @click.option("--geometry", "name", type=click.Choice(["flash", "pro"]), default="flash", show_default=True)
    @click.option(
        "--length",
        "lengths",
        type=click.IntRange(1024, 1 << 20),
        multiple=True,
        default=(65536, 131072, 262144, 440000),
        show_default=True,
    )
    @click.option("--documents", type=click.IntRange(1, 1024), default=8, show_default=True)
    @click.option("--budget", type=FiniteRange(0, 1), default=0.10, show_default=True)
    @click.option("--epilogue", type=click.Choice(["full", "active"]), default="full", show_default=True)
    @click.option("--measured", type=click.Path(path_type=Path), help="A file of run/bench_ttft.py to compare with.")
    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    def projections(
        name: str, lengths: tuple[int, ...], documents: int, budget: float, epilogue: str, measured: Path | None,
        as_json: bool,
    ) -> None:  # fmt: skip
        """Ceilings, rows saved by length and the break-even of cold artifacts, worked out, not measured."""
        from trt_redknot.evaluation.planning import Check, ceiling, project

        geometry = released_geometry(cast('Literal["flash", "pro"]', name))
        profile = SplitProfile.default(geometry, name=name)
        policy = ReusePolicy(budget=budget, epilogue=cast('Literal["full", "active"]', epilogue))
        rows = [project(geometry, profile, length, documents, policy) for length in lengths]
        checks: list[Check] = []
        for point in read_measured(measured, name) if measured is not None else []:
            if point.arm not in _ARMS:
                continue
            beside = project(geometry, profile, point.length, point.documents, _ARMS[point.arm](point.tail))
            checks.append(
                Check(
                    length=point.length, arm=point.arm, projected_rows=beside.token_rows,
                    measured_rows=point.token_rows_saved, projected_speedup=beside.arithmetic_speedup,
                    measured_speedup=point.speedup,
                )
            )  # fmt: skip
        out = Output()
        if as_json:
            out.json({"evidence": Evidence.PROJECTED.value, "geometry": name, "ceiling": ceiling(geometry, profile),
                      "policy": policy.model_dump(mode="json"), "lengths": [row.to_json() for row in rows],
                      "checks": [dict(check.to_json()) for check in checks]})  # fmt: skip
            return
        out.show(
            f"{name}: at most {ceiling(geometry, profile):.2%} of logical head-rows can be saved "
            f"({Evidence.PROJECTED.value})",
            _table(name, rows),
        )
        if measured is not None:
            out.show(_checks(checks))

    return projections


def _table(name: str, rows: list[Projection]) -> Table:
    table = Table(title=f"{name}: what reuse could save ({Evidence.PROJECTED.value})")
    for column in ("length", "token-rows saved", "head-rows saved", "arithmetic saved", "arithmetic speed-up",
                   "making artifacts, in recomputations", "break-even, requests"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.length:,}", f"{row.token_rows:.1%}", f"{row.head_rows:.1%}", f"{row.arithmetic:.1%}",
            f"{row.arithmetic_speedup:.2f}", f"{row.construction:.2f}",
            "never" if row.break_even is None else f"{row.break_even:.2f}",
        )  # fmt: skip
    return table


def _checks(checks: list[Check]) -> Table:
    table = Table(title=f"Projections ({Evidence.PROJECTED.value}) beside a bench file ({Evidence.ARCHIVED.value})")
    for column in ("length", "arm", "token-rows saved: projected", "counted", "speed-up: arithmetic", "measured"):
        table.add_column(column, justify="right")
    for check in checks:
        table.add_row(
            f"{check.length:,}", check.arm, f"{check.projected_rows:.1%}", f"{check.measured_rows:.1%}",
            f"{check.projected_speedup:.2f}", f"{check.measured_speedup:.2f}",
        )  # fmt: skip
    return table
