"""The command behind `run/profile_heads.py`: which head of each group should be Global, as a profile file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from trt_redknot.cli.engine_options import DEVICE_OPTION, ENGINE_OPTION
from trt_redknot.cli.output import Output
from trt_redknot.config.profile import SplitProfile
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.frozen import open_frozen
from trt_redknot.evaluation.prompts import Cutting, make_prompt

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from trt_redknot.evaluation.heads import Drift


def profile_heads_command(comm: Intracomm | None) -> click.Command:
    """The click command of one rank."""

    @click.command(
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        epilog="""\b
Example:
  python run/profile_heads.py --engine engine --records examples/nano/records --output work/heads.json
  python build_engine.py --checkpoint DIR --output work/engine-heads --profile work/heads.json
""",
    )
    @ENGINE_OPTION
    @DEVICE_OPTION
    @click.option("--records", "records_dir", type=click.Path(path_type=Path), required=True, help="Frozen record set.")
    @click.option("--only", multiple=True, help="A file of the set; may be repeated. Left out: all files.")
    @click.option("--limit", type=click.IntRange(1), default=8, show_default=True, help="Most records to run.")
    @click.option("--output", type=click.Path(path_type=Path), required=True, help="Profile file to write.")
    @click.option("--json", "as_json", is_flag=True, help="Print every head's drift as JSON.")
    def command(
        engine_dir: Path, device: str | None, records_dir: Path, only: tuple[str, ...], limit: int, output: Path,
        as_json: bool,
    ) -> None:  # fmt: skip
        """Rank heads by how much their output changes between a document alone and the document in context."""
        from trt_redknot.engine.engine import Engine
        from trt_redknot.engine.tokenizer import EngineTokenizer
        from trt_redknot.evaluation.heads import HeadTap, drift_profile, measure_drift
        from trt_redknot.reports.page import write_page

        tap = HeadTap()
        engine = Engine.open(engine_dir, comm, device=device, watch=tap.watch)
        tokenizer = EngineTokenizer(engine_dir)
        out = Output(engine.collectives.rank)
        _, questions = open_frozen(records_dir, only)
        prompts = [make_prompt(question.record, tokenizer.encode, Cutting()) for question in questions]
        prompts = [prompt for prompt in prompts if len(prompt.documents) > 1][:limit]
        drift: Drift | None = None
        with out.progress("comparing heads", len(prompts)) as advance:
            for prompt in prompts:
                own = measure_drift(engine, tap, prompt.documents)
                drift = own if drift is None else drift + own
                advance(1)
        if drift is None:
            raise click.UsageError("--records: no record has two documents, so nothing has a context.")
        profile = drift_profile(engine, drift, output.stem)
        if engine.collectives.rank == 0:
            write_page(output, json.dumps(profile.model_dump(mode="json"), indent=1) + "\n")
        if as_json:
            out.json({"evidence": Evidence.MEASURED.value, "rows": drift.rows, "change": drift.change.tolist(),
                      "size": drift.size.tolist()})  # fmt: skip
        else:
            out.show(_table(profile, drift))
        out.note(f"profile: {output}")

    return command


def _table(profile: SplitProfile, drift: Drift) -> Table:
    """One line a reusable layer and group: the head chosen, and its share of the group's change."""
    table = Table(title=f"Drift of heads over {drift.rows:,} rows ({Evidence.MEASURED.value})")
    for column in ("layer", "group", "Global head", "its share of the change", "of head 0", "change of the group"):
        table.add_column(column, justify="right")
    for layer in profile.reusable:
        for group in range(profile.output_groups):
            change, size = drift.change[layer, group], float(drift.size[layer, group].sum())
            total = float(change.sum()) or 1.0
            head = profile.global_head(layer, group)
            table.add_row(
                str(layer), str(group), str(head), f"{float(change[head]) / total:.1%}",
                f"{float(change[0]) / total:.1%}", f"{float(change.sum()) / size:.2%}" if size else "-",
            )  # fmt: skip
    return table
