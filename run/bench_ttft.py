"""Time to first token of both arms at released geometry, on one GPU that plays one rank of a tensor-parallel group.

Weights and artifacts are random and lie in device memory (hot artifacts); collectives are device copies of the same
size.
Both arms run the same engine over the same tokens, warmed up, in one process.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Literal, cast

import click
import torch
from rich.table import Table

from trt_redknot.cli.command import run_command
from trt_redknot.cli.output import Output
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.config.released import released_geometry
from trt_redknot.engine.prefill import Prefilled
from trt_redknot.evaluation.standin import DeviceArtifact, rank_context
from trt_redknot.evaluation.ttft import QUESTION, first_token, segment_table
from trt_redknot.reports.ledgers import ledgers
from trt_redknot.reports.report import RowCounts


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--geometry", "name", type=click.Choice(["flash", "pro"]), default="flash", show_default=True)
@click.option("--tp", type=click.IntRange(1), default=8, show_default=True, help="Ranks of the group.")
@click.option("--layers", type=click.IntRange(7), help="Only so many layers (fences kept), where memory is short.")
@click.option("--length", "lengths", type=click.IntRange(1024), multiple=True, default=(65536,), show_default=True)
@click.option("--documents", type=click.IntRange(1), default=8, show_default=True)
@click.option("--budget", type=click.FloatRange(0, 1), default=0.10, show_default=True)
@click.option("--tail", type=click.IntRange(0), default=32768, show_default=True)
@click.option("--chunk-rows", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@torch.inference_mode()
def main(
    name: str, tp: int, layers: int | None, lengths: tuple[int, ...], documents: int, budget: float, tail: int,
    chunk_rows: int, repeat: int, json_file: Path | None,
) -> None:  # fmt: skip
    """Time both arms at released geometry on one GPU as one rank of a group."""
    device = torch.device("cuda")
    out = Output()
    geometry = released_geometry(cast('Literal["flash", "pro"]', name))
    if layers is not None:
        geometry = dataclasses.replace(
            geometry, attention_kinds=geometry.attention_kinds[:layers], router_kinds=geometry.router_kinds[:layers]
        )
    context, shared = rank_context(geometry, 0, tp, chunk_rows=chunk_rows, length=max(lengths) + 1, device=device)
    results: list[dict[str, object]] = []
    for length in lengths:
        size = (length - QUESTION) // documents
        artifacts = {
            index: DeviceArtifact(geometry, size, context.local_width, context.dtype, device)
            for index in range(documents)
        }
        arms: list[tuple[str, ReusePolicy | None]] = [
            ("recompute", None),
            ("full", ReusePolicy(budget=budget, tail=tail, epilogue="full")),
            ("active", ReusePolicy(budget=budget, tail=tail, epilogue="active")),
            ("fast", ReusePolicy(budget=0.05, tail=4096, epilogue="active")),
        ]
        times: dict[str, list[float]] = {arm: [] for arm, _ in arms}
        plans: dict[str, Prefilled] = {}
        torch.cuda.reset_peak_memory_stats()
        for turn in range(repeat + 1):
            for arm, policy in arms:
                segments = segment_table(length, documents, reuse=policy is not None)
                seconds, plans[arm] = first_token(
                    context, shared, segments, artifacts if policy is not None else {}, policy
                )
                if turn:
                    times[arm].append(seconds)
        base = statistics.median(times["recompute"])
        for arm, policy in arms:
            plan = plans[arm].plan
            saved = ledgers(geometry, context.profile, plan, "full" if policy is None else policy.epilogue).token_rows
            results.append(
                {
                    "length": length,
                    "arm": arm,
                    "ttft_s": statistics.median(times[arm]),
                    "spread_s": max(times[arm]) - min(times[arm]),
                    "speedup": base / statistics.median(times[arm]),
                    "rows": dataclasses.asdict(RowCounts.of(plan)),
                    "token_rows_saved": saved.share,
                    "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                }
            )
        del artifacts
    table = Table(title=f"{name}, {geometry.layers} layers, one rank of TP={tp}, {torch.cuda.get_device_name()}")
    for column in ("length", "arm", "ttft s", "spread s", "speed-up", "protected", "active", "token-rows saved"):
        table.add_column(column, justify="right")
    for result in results:
        rows = cast("dict[str, int]", result["rows"])
        table.add_row(
            f"{result['length']:,}", str(result["arm"]), f"{result['ttft_s']:.3f}", f"{result['spread_s']:.3f}",
            f"{result['speedup']:.2f}", f"{rows['protected']:,}", f"{rows['active']:,}",
            f"{result['token_rows_saved']:.1%}",
        )  # fmt: skip
    out.show(table)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False))
