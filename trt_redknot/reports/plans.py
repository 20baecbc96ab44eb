"""The plans of a tensorrt engine as a table: what `build_engine.py --backend tensorrt --dry-run` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from trt_redknot.engine.tensorrt.memory import plan_bytes
from trt_redknot.engine.tensorrt.profiles import Phase, PlanLimits, profile_ranges
from trt_redknot.engine.tensorrt.specification import PlanSpec
from trt_redknot.engine.tensorrt.verification import OutputError
from trt_redknot.ops.tensorrt.tensors import Extent, Size
from trt_redknot.reports.estimate import human_bytes

if TYPE_CHECKING:
    from trt_redknot.cli.output import Output


def plans_to_json(specs: Sequence[PlanSpec], limits: PlanLimits) -> list[dict[str, object]]:
    """One object a plan: layers, inputs and outputs with types and shapes, ranges of the sizes that change."""
    return [
        {
            "name": spec.kind.name,
            "layers": list(spec.kind.layers(spec.geometry)),
            "inputs": {tensor.name: [tensor.type.value, *map(_size, tensor.shape)] for tensor in spec.inputs},
            "outputs": {tensor.name: [tensor.type.value, *map(_size, tensor.shape)] for tensor in spec.outputs},
            "ranges": {phase.value: _ranges(spec, limits, phase) for phase in Phase},
            "largest_bytes": plan_bytes(spec, limits),
        }
        for spec in specs
    ]


def show_plans(out: Output, specs: Sequence[PlanSpec], limits: PlanLimits) -> None:
    """Print one row a plan."""
    table = Table(title=f"Plans, the same on each of {specs[0].world} rank(s)", title_justify="left")
    for column in ("plan", "layers", "weights", "other inputs", "outputs", "rows, prefill", "rows, decode"):
        table.add_column(column, justify="left" if column in ("plan", "other inputs", "outputs") else "right")
    table.add_column("tensors at largest", justify="right")
    for spec in specs:
        layers = spec.kind.layers(spec.geometry)
        table.add_row(
            spec.kind.name,
            str(len(layers)) if layers else "-",
            str(sum(tensor.weight for tensor in spec.inputs)),
            ", ".join(tensor.name for tensor in spec.inputs if not tensor.weight),
            ", ".join(tensor.name for tensor in spec.outputs),
            *(_rows(spec, limits, phase) for phase in Phase),
            human_bytes(plan_bytes(spec, limits)),
        )
    out.show(table)


def show_errors(out: Output, errors: Sequence[OutputError]) -> None:
    """Print what verification found, one row an output."""
    table = Table(title="Plans against the reference backend, random inputs", title_justify="left")
    for column in ("plan", "output"):
        table.add_column(column)
    for column in ("error", "tolerance", "result"):
        table.add_column(column, justify="right")
    for error in errors:
        result = "pass" if error.passed else "FAIL"
        table.add_row(error.plan, error.output, f"{error.error:.2e}", f"{error.tolerance:.2e}", result)
    out.show(table)


def _ranges(spec: PlanSpec, limits: PlanLimits, phase: Phase) -> dict[str, list[int]]:
    ranges = profile_ranges(spec.geometry, spec.kind.stage, limits, spec.world, phase)
    used = {size.extent for tensor in spec.inputs for size in tensor.shape if isinstance(size, Size)}
    return {extent.value: list(ranges[extent]) for extent in Extent if extent in used}


def _rows(spec: PlanSpec, limits: PlanLimits, phase: Phase) -> str:
    """Range of the first axis of the plan's first output."""
    size = spec.outputs[0].shape[0]
    assert isinstance(size, Size), "a plan makes rows"
    found = profile_ranges(spec.geometry, spec.kind.stage, limits, spec.world, phase)[size.extent].times(size.factor)
    return f"{found.least:,} .. {found.most:,}"


def _size(size: int | Size) -> int | str:
    return str(size) if isinstance(size, Size) else size
