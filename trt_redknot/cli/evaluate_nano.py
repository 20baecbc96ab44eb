"""`run/evaluate.py nano`: everything that docs/quality.md shows of the nano checkpoint, by one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.output import Output
from trt_redknot.cli.profile_heads import profile_heads_command
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.journal import RESULTS, read_journal
from trt_redknot.evaluation.markdown import groups_markdown, overall_markdown
from trt_redknot.evaluation.summary import summarise
from trt_redknot.evaluation.variants import AXES
from trt_redknot.reports.page import write_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py.MPI import Intracomm

TABLES = "tables.md"
# The default of 128 boundary rows is twice the nano network's window, and covers its documents whole.
_BOUNDARY = 8
_PATH = click.Path(path_type=Path)


def nano_command(
    comm: Intracomm | None,
    run: Callable[[Intracomm | None], click.Command],
    sweep: Callable[[Intracomm | None], click.Command],
) -> click.Command:
    """The click command.

    Args:
        run, sweep: the commands that evaluate one policy and many.
    """

    @click.command("nano")
    @click.option("--checkpoint", type=_PATH, required=True, help="Trained nano checkpoint.")
    @click.option("--records", type=_PATH, required=True, help="Folder of the frozen nano records.")
    @click.option("--output", type=_PATH, required=True, help="Folder of engines, results and tables.")
    @click.option("--sweep-file", default="nano-1024.jsonl", show_default=True, help="Record file of the sweeps.")
    @click.option(
        "--profile-records",
        type=click.IntRange(1),
        default=8,
        show_default=True,
        help="Records that heads are compared on.",
    )
    @click.option("--limit", type=click.IntRange(1), help="Only so many records of each file and kind of answer.")
    @click.option("--only", multiple=True, help="Record files of the default policy. Left out: all.")
    @click.option("--axis", "axes", type=click.Choice(AXES), multiple=True, help="Sweeps. Left out: all.")
    @click.option("--short-tokens", type=click.IntRange(1), default=32, show_default=True)
    @click.option("--longer-tokens", type=click.IntRange(1), default=128, show_default=True)
    @click.option("--device", default="cpu", show_default=True, help="Where the engines compute, as torch names it.")
    def nano(
        checkpoint: Path, records: Path, output: Path, sweep_file: str, profile_records: int, limit: int | None,
        only: tuple[str, ...], axes: tuple[str, ...], short_tokens: int, longer_tokens: int, device: str,
    ) -> None:  # fmt: skip
        """Build engines and a head profile, then measure the default policy at every length and all sweeps at one."""
        out = Output()
        if comm is not None and comm.Get_size() > 1:
            raise click.UsageError("nano runs on one rank; start it without mpirun.")
        heads = output / "heads.json"
        base, packed, chosen = (output / f"engine-{name}" for name in ("base", "fp8", "heads"))
        _engine(base, checkpoint)
        if not heads.is_file():
            _call(profile_heads_command(comm), "--engine", base, "--records", records, "--only", sweep_file, "--limit",
                  profile_records, "--output", heads)  # fmt: skip
        _engine(packed, checkpoint, "--artifact-format", "fp8")
        _engine(chosen, checkpoint, "--profile", heads)
        shared = ["--engine", base, "--records", records, "--store", output / "store", "--set", f"boundary={_BOUNDARY}",
                  "--device", device, "--short-tokens", short_tokens, "--longer-tokens", longer_tokens,
                  *(["--limit", limit] if limit else [])]  # fmt: skip
        files = [part for name in only for part in ("--only", name)]
        varied = [part for name in axes for part in ("--axis", name)]
        _call(run(comm), *shared, *files, "--output", output / "lengths")
        _call(sweep(comm), *shared, *varied, "--only", sweep_file, "--output", output / "sweep", "--also",
              f"fp8={packed}", "--also", f"heads={chosen}")  # fmt: skip
        write_page(output / TABLES, _tables(output))
        out.note(f"tables: {output / TABLES}")

    return nano


def _tables(output: Path) -> str:
    run, pairs = read_journal(output / "lengths" / RESULTS)
    lengths = summarise(run, pairs, Evidence.MEASURED)
    run, pairs = read_journal(output / "sweep" / RESULTS)
    swept = summarise(run, pairs, Evidence.MEASURED)
    parts = ["## Default policy by length\n", groups_markdown(lengths, "policy", "file")]
    parts += ["## Default policy by kind of question\n", groups_markdown(lengths, "policy", "kind")]
    for axis in swept.axes:
        parts += [f"## {axis}\n", overall_markdown(swept, axis)]
    return "\n".join(parts)


def _engine(directory: Path, checkpoint: Path, *more: object) -> None:
    if not directory.exists():
        _call(build_engine_command(None), "--checkpoint", checkpoint, "--output", directory, *more)


def _call(command: click.Command, *arguments: object) -> None:
    command.main([str(argument) for argument in arguments], standalone_mode=False)
