"""Time to first token of both arms at released geometry: alone on one GPU as one rank of a group, or with all ranks.

Weights and artifacts are random; both arms run the same engine over the same tokens, warmed up, by turns, in one
process. Alone, collectives are device copies of the same size. Under mpirun the ranks are real and exchange rows over
NCCL:

    python run/bench_ttft.py --length 65536
    mpirun -n 2 python -m mpi4py run/bench_ttft.py --length 65536 --layers 9

First the arms are checked on a smaller network: rows of a request whose rows are all protected must be those of
recomputation, bit for bit, and a question behind an artifact hardly further from it than recomputations are from each
other. Where they are not, that is shown at once, and the command fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_redknot.cli.command import run_command
from trt_redknot.cli.numbers import FiniteRange
from trt_redknot.launch import world_communicator


class Layers(click.ParamType[int | str]):
    """A number of layers, or 'fit'."""

    name = "number|fit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return "fit" if value == "fit" else int(click.IntRange(7).convert(value, param, ctx))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--geometry", type=click.Choice(["flash", "pro"]), default="flash")
@click.option("--tp", type=click.IntRange(1), default=8, help="Alone: ranks of the group that this one belongs to.")
@click.option(
    "--layers",
    type=Layers(),
    help="Only so many layers (fences kept), 7 or more; fit: as many as there is memory for.",
)
@click.option("--length", "lengths", type=click.IntRange(1024), multiple=True, default=(65536,))
@click.option("--documents", type=click.IntRange(1), default=8)
@click.option("--budget", "budgets", type=FiniteRange(0, 1), multiple=True, default=(0.10,))
@click.option("--tail", type=click.IntRange(0), default=32768)
@click.option(
    "--chunk-rows", type=click.IntRange(1), help="Rows of a chunk, at most; left out: what memory has room for."
)
@click.option("--repeat", type=click.IntRange(1), default=5)
@click.option("--artifacts", "place", type=click.Choice(["device", "host"]), default="device", help="Where they lie.")
@click.option(
    "--format", "form", type=click.Choice(["bfloat16", "fp8"]), default="bfloat16", help="How they are stored."
)
@click.option("--experts", type=click.Choice(["same", "fp8"]), default="same", help="How expert weights are held.")
@click.option("--read-ahead", type=click.IntRange(0), default=3, help="Layers of the ring; 0 reads when a layer asks.")
@click.option("--decode", type=click.IntRange(0), default=32, help="Tokens to decode after each arm; 0: none.")
@click.option("--check-runs", type=click.IntRange(0), default=12, help="Prompts of the check; 0: no check.")
@click.option("--check-only", is_flag=True, help="Check the arms, and time nothing.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--page", type=click.Path(path_type=Path), help="Write an HTML page with figures here.")
def main(form: str, check_runs: int, check_only: bool, lengths: tuple[int, ...], **options: Any) -> None:
    """Time both arms at released geometry with random weights. Needs a GPU and the kernel library (make plugins)."""
    from trt_redknot.artifacts.formats import ArtifactFormat
    from trt_redknot.evaluation.ttft_bench import BenchOptions, CheckOptions, run_bench

    if check_only and not check_runs:
        raise click.UsageError("--check-only with --check-runs 0 leaves nothing to do.")
    world = world_communicator()
    wanted = BenchOptions(
        form=ArtifactFormat(form), check=CheckOptions(runs=check_runs), lengths=() if check_only else lengths, **options
    )
    run_bench(wanted, world if world is not None and world.Get_size() > 1 else None)


if __name__ == "__main__":
    run_command(lambda: main(standalone_mode=False), world_communicator())
