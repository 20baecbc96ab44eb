"""The commands behind `run/evaluate.py`: paired arms, sweeps, reports, projections, record sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_redknot.cli.command import run_command
from trt_redknot.cli.engine_options import DEVICE_OPTION
from trt_redknot.cli.evaluate_nano import TABLES, nano_command
from trt_redknot.cli.evaluate_plan import projections_command
from trt_redknot.cli.output import Output
from trt_redknot.config.documents import validated_json
from trt_redknot.config.policy import ReusePolicy
from trt_redknot.errors import ConfigError, RequestError
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.frozen import LONGER, SHORT, freeze, open_frozen
from trt_redknot.evaluation.variants import AXES, BASE_ENGINE, Variant, joined, single, sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py.MPI import Intracomm

    from trt_redknot.evaluation.summary import Summary

PAGE, SUMMARY, FIGURES = "report.html", "summary.json", "figures"
_PATH = click.Path(path_type=Path)


def evaluate_command(comm: Intracomm | None) -> click.Group:
    """The click group of one rank."""

    @click.group(
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        epilog="""\b
Examples:
  python run/evaluate.py run --engine engine --records examples/nano/records --output work/eval
  python run/evaluate.py sweep --engine engine --records examples/nano/records --output work/sweep --axis budget
  python run/evaluate.py report --output work/sweep           the page and tables again, from saved results
  python run/evaluate.py report --output work/quality/lengths --group "names a chief=chief"
  python run/evaluate.py projections --geometry flash --length 65536 --length 440000
  python run/evaluate.py nano --checkpoint work/nano/checkpoint --records examples/nano/records --output work/quality
  python run/evaluate.py freeze --name my-set records/hotpotqa.jsonl
An evaluation that was stopped, by whatever means, goes on where it was when the same command is given again.
""",
    )
    def group() -> None:
        """Measure what reuse costs in answers: both arms, same tokens, side by side."""

    group.add_command(_run_command(comm))
    group.add_command(_sweep_command(comm))
    group.add_command(_report_command())
    group.add_command(_freeze_command())
    group.add_command(projections_command())
    group.add_command(nano_command(comm, _run_command, _sweep_command))
    return group


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that `run` and `sweep` share."""
    options = [
        click.option("--engine", "engine_dir", type=_PATH, required=True, help="Engine folder, with a tokenizer."),
        click.option("--records", "records_dir", type=_PATH, required=True, help="Folder of a frozen record set."),
        click.option("--only", multiple=True, help="A file of the set; may be repeated. Left out: all files."),
        click.option("--output", type=_PATH, required=True, help="Folder of results, summary and page."),
        click.option("--store", "store_dir", type=_PATH, help="Artifact store. Left out: inside the output folder."),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                     help="A key of the reuse policy (docs/policy.md), e.g. --set budget=0.2. May be repeated."),
        click.option("--documents", type=click.IntRange(1),
                     help="Join each context's documents until so many are left. Left out: as the records have them."),
        click.option("--short-tokens", type=click.IntRange(1), default=32, show_default=True,
                     help="Most tokens of a short answer."),
        click.option("--longer-tokens", type=click.IntRange(1), default=128, show_default=True,
                     help="Most tokens of a longer answer."),
        DEVICE_OPTION,
        click.option("--limit", type=click.IntRange(1), help="Only so many records of each file and kind of answer."),
        click.option("--dry-run", is_flag=True, help="Only say how many records, tokens and seconds it would take."),
        click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of tables."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _run_command(comm: Intracomm | None) -> click.Command:
    @click.command("run")
    @_common
    def run(**options: Any) -> None:
        """Both arms of every record, with one policy."""
        _evaluate(comm, options, lambda policy, _, __: single(policy), {})

    return run


def _sweep_command(comm: Intracomm | None) -> click.Command:
    @click.command("sweep")
    @_common
    @click.option("--axis", "axes", type=click.Choice(AXES), multiple=True, help="What to vary. Left out: everything.")
    @click.option(
        "--also",
        multiple=True,
        metavar="NAME=DIR",
        help="A further engine of the same tokenizer for the axis `engine`: FP8 artifacts, another profile.",
    )
    def sweep_(axes: tuple[str, ...], also: tuple[str, ...], **options: Any) -> None:
        """Both arms of every record, with one thing after the other varied."""
        further = _named(also, "--also", (BASE_ENGINE,))
        _evaluate(
            comm, options,
            lambda policy, multiple, names: sweep(policy, axes or AXES, multiple=multiple, engines=names),
            {name: Path(folder) for name, folder in further.items()},
        )  # fmt: skip

    return sweep_


def _evaluate(
    comm: Intracomm | None, options: dict[str, Any], make: Callable[[ReusePolicy, int, list[str]], list[Variant]],
    further: dict[str, Path],
) -> None:  # fmt: skip
    from trt_redknot.artifacts.store import ArtifactStore
    from trt_redknot.engine.engine import Engine
    from trt_redknot.engine.tokenizer import EngineTokenizer
    from trt_redknot.evaluation.arms import ArmRunner
    from trt_redknot.evaluation.journal import RESULTS, read_journal
    from trt_redknot.evaluation.runner import Evaluation
    from trt_redknot.evaluation.summary import summarise

    policy = _policy(options["settings"])
    frozen, questions = open_frozen(options["records_dir"], options["only"])
    if options["limit"] is not None:
        kept: dict[tuple[str, bool], int] = {}
        limited = []
        for question in questions:
            key = (question.file, question.longer)
            kept[key] = kept.get(key, 0) + 1
            if kept[key] <= options["limit"]:
                limited.append(question)
        questions = limited
    output: Path = options["output"]
    store = ArtifactStore(options["store_dir"] or output / "store")
    runners = {
        name: ArmRunner(
            engine=Engine.open(folder, comm, device=options["device"]), tokenizer=EngineTokenizer(folder), store=store,
            short_tokens=options["short_tokens"], longer_tokens=options["longer_tokens"],
        )
        for name, folder in {BASE_ENGINE: options["engine_dir"], **further}.items()
    }  # fmt: skip
    engine = runners[BASE_ENGINE].engine
    evaluation = Evaluation(
        frozen=frozen,
        questions=questions,
        runners=runners,
        variants=joined(make(policy, engine.geometry.coarsest_ratio, list(further)), options["documents"]),
    )
    out = Output(engine.collectives.rank)
    if options["dry_run"]:
        work = evaluation.workload(_finished(output))
        out.json(
            {
                "records": work.records,
                "pairs": work.pairs,
                "finished": work.done,
                "prompt_tokens": work.prompt_tokens,
                "estimated_seconds": round(work.seconds, 1),
                "estimated_from": f"one pair of {work.probe_tokens} tokens, answers as long as allowed",
            }
        )
        return
    with out.progress("evaluating", len(evaluation.variants) * len(questions)) as advance:
        evaluation.run(output, advance)
    if engine.collectives.rank == 0:
        run, pairs = read_journal(output / RESULTS)
        _publish(out, output, summarise(run, pairs, Evidence.MEASURED), as_json=options["as_json"])


def _finished(output: Path) -> int:
    from trt_redknot.evaluation.journal import RESULTS, read_journal

    path = output / RESULTS
    return len(read_journal(path)[1]) if path.is_file() else 0


def _report_command() -> click.Command:
    @click.command("report")
    @click.option(
        "--output",
        type=_PATH,
        required=True,
        help="Folder that an evaluation wrote, or one that holds several of the same comparison: put together.",
    )
    @click.option(
        "--group",
        "groups",
        multiple=True,
        metavar="NAME=PATTERN",
        help="A further group of pairs: those whose question has the regular expression; with !PATTERN, has it not.",
    )
    @click.option(
        "--complete",
        is_flag=True,
        help="Only records that every variant has a result of, if an evaluation was stopped.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON instead of tables.")
    def report(output: Path, groups: tuple[str, ...], complete: bool, as_json: bool) -> None:
        """Write the page, Markdown tables and figures of saved results, and print the tables."""
        from trt_redknot.evaluation.merging import of_all_variants, read_results, result_folders
        from trt_redknot.evaluation.summary import QuestionGroup, summarise

        named = [QuestionGroup.parse(*pair) for pair in _named(groups, "--group").items()]
        run, pairs = read_results(result_folders(output))
        kept = of_all_variants(run, pairs) if complete else pairs
        _publish(Output(), output, summarise(run, kept, Evidence.ARCHIVED, named), as_json=as_json)

    return report


def _publish(out: Output, output: Path, summary: Summary, *, as_json: bool) -> None:
    from trt_redknot.evaluation.charts import figures
    from trt_redknot.evaluation.markdown import summary_markdown
    from trt_redknot.evaluation.page import render_evaluation
    from trt_redknot.evaluation.tables import answers_table, detail_table, left_out_table, summary_table
    from trt_redknot.reports.page import write_page

    write_page(output / PAGE, render_evaluation(summary, f"Reuse against recomputation: {summary.run['records']}"))
    write_page(output / SUMMARY, json.dumps(summary.to_json(), indent=1) + "\n")
    write_page(output / TABLES, summary_markdown(summary))
    for name, figure in figures(summary).items():
        write_page(output / FIGURES / f"{name}.svg", figure + "\n")
    if as_json:
        out.json(summary.to_json())
    else:
        out.show(summary_table(summary), answers_table(summary))
        if len(summary.overall()) == 1:
            out.show(detail_table(summary, summary.overall()[0].variant))
        left_out = left_out_table(summary)
        if left_out is not None:
            out.show(left_out)
    out.note(f"page: {output / PAGE}")


def _freeze_command() -> click.Command:
    @click.command("freeze")
    @click.argument("files", nargs=-1, required=True, type=_PATH)
    @click.option("--name", required=True, help="What to call the set.")
    @click.option("--short", type=click.IntRange(0), default=SHORT, show_default=True)
    @click.option("--longer", type=click.IntRange(0), default=LONGER, show_default=True)
    def freeze_(files: tuple[Path, ...], name: str, short: int, longer: int) -> None:
        """Pin record files that lie in one folder: short answers first in each, then longer ones."""
        frozen = freeze(files[0].parent, name, files, short=short, longer=longer)
        Output().note(f"{name}: {len(frozen.files)} file(s), digest {frozen.digest}")

    return freeze_


def _policy(settings: tuple[str, ...]) -> ReusePolicy:
    """The default policy with the settings. Raises RequestError for an unknown key or a wrong value."""
    values: dict[str, Any] = {}
    for text in settings:
        key, value = _pair(text, "--set")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    try:
        return validated_json(ReusePolicy, values, "--set")
    except ConfigError as error:
        raise RequestError(
            f"the reuse policy is ill-formed: {error.problem}", remedy="The keys are in docs/policy.md."
        ) from error


def _named(texts: tuple[str, ...], option: str, taken: tuple[str, ...] = ()) -> dict[str, str]:
    """NAME=VALUE texts by name. Raises UsageError for a name that is taken or given twice: one would hide the other."""
    named: dict[str, str] = {}
    for text in texts:
        name, value = _pair(text, option)
        if name in named or name in taken:
            raise click.UsageError(f"{option}: the name {name!r} is taken; choose another.")
        named[name] = value
    return named


def _pair(text: str, option: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise click.UsageError(f"{option}: expected NAME=VALUE, found {text!r}.")
    return key, value


if __name__ == "__main__":
    run_command(lambda: evaluate_command(None).main(standalone_mode=False))
