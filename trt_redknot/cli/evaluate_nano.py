"""`run/evaluate.py nano`: everything that docs/quality.md shows of the nano checkpoint, by one command."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.output import Output
from trt_redknot.cli.profile_heads import profile_heads_command
from trt_redknot.errors import LaunchError
from trt_redknot.evaluation.evidence import Evidence
from trt_redknot.evaluation.frozen import open_frozen
from trt_redknot.evaluation.variants import AXES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpi4py.MPI import Intracomm

TABLES = "tables.md"
LENGTHS, SWEEPS = "lengths", "sweep"
_ENGINES = "engine"
_POLL_S = 0.2
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
    @click.option(
        "--sweep-file", "sweep_files", multiple=True, default=["nano-1024.jsonl"], show_default=True,
        help="Record files of the sweeps.",
    )  # fmt: skip
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
    @click.option(
        "--documents",
        type=click.IntRange(1),
        help="Join each context's documents until so many are left. Left out: as the records have them.",
    )
    @click.option("--short-tokens", type=click.IntRange(1), default=32, show_default=True)
    @click.option("--longer-tokens", type=click.IntRange(1), default=128, show_default=True)
    @click.option("--device", default="cpu", show_default=True, help="Where the engines compute, as torch names it.")
    @click.option(
        "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Measurements in processes side by side."
    )
    def nano(
        checkpoint: Path, records: Path, output: Path, sweep_files: tuple[str, ...], profile_records: int,
        limit: int | None, only: tuple[str, ...], axes: tuple[str, ...], documents: int | None, short_tokens: int,
        longer_tokens: int, device: str, jobs: int,
    ) -> None:  # fmt: skip
        """Build engines and a head profile, then measure the default policy at every length and all sweeps at one."""
        from trt_redknot.reports.page import write_page

        out = Output()
        if comm is not None and comm.Get_size() > 1:
            raise click.UsageError("nano runs on one rank; start it without mpirun.")
        heads = output / "heads.json"
        base, packed, chosen = (output / f"engine-{name}" for name in ("base", "fp8", "heads"))
        files = list(only) or [file.name for file in open_frozen(records, ())[0].files]
        shared = ["--engine", base, "--records", records, "--store", output / "store",
                  "--device", device,
                  "--short-tokens", short_tokens, "--longer-tokens", longer_tokens,
                  *(["--limit", limit] if limit else []),
                  *(["--documents", documents] if documents else [])]  # fmt: skip
        parts = [_Part(command="run", output=output / LENGTHS / name, options=["--only", name]) for name in files]
        parts += [
            _Part(
                command="sweep", output=output / SWEEPS / axis / name, axis=axis,
                options=["--only", name, "--axis", axis,
                         *(["--also", f"fp8={packed}", "--also", f"heads={chosen}"] if axis == _ENGINES else [])],
            )
            for axis in axes or AXES
            for name in sweep_files
        ]  # fmt: skip
        _engine(base, checkpoint)
        commands = {"run": run(comm), "sweep": sweep(comm)}
        at_once = [part for part in parts if part.axis != _ENGINES]
        of_engines = [part for part in parts if part.axis == _ENGINES]
        with _Jobs(commands, jobs) as running:
            for part in at_once:
                running.start(part, shared)
            if of_engines:
                if not heads.is_file():
                    _call(profile_heads_command(comm), "--engine", base, "--records", records, "--only", sweep_files[0],
                          "--limit", profile_records, "--output", heads)  # fmt: skip
                _engine(packed, checkpoint, "--artifact-format", "fp8")
                _engine(chosen, checkpoint, "--profile", heads)
                for part in of_engines:
                    running.start(part, shared)
        write_page(output / TABLES, _tables(parts))
        out.note(f"tables: {output / TABLES}")

    return nano


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One measurement: the command, where its results go, its axis if it is a sweep, what it has beside the shared
    options."""

    command: str
    output: Path
    options: list[object]
    axis: str | None = None


class _Jobs:
    """Runs parts: here, one after the other, or in so many processes side by side."""

    def __init__(self, commands: Mapping[str, click.Command], jobs: int) -> None:
        self._commands, self._jobs = commands, jobs
        self._running: list[tuple[_Part, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while self._running and kind is None:
                self._wait()
        finally:
            for _part, process in self._running:
                process.terminate()
                process.wait()

    def start(self, part: _Part, shared: Sequence[object]) -> None:
        arguments = [*shared, *part.options, "--output", part.output]
        if self._jobs == 1:
            _call(self._commands[part.command], *arguments)
            return
        while len(self._running) >= self._jobs:
            self._wait()
        command = [sys.executable, "-m", "trt_redknot.cli.evaluate", part.command, *map(str, arguments)]
        self._running.append((part, subprocess.Popen(command, stdout=subprocess.DEVNULL)))

    def _wait(self) -> None:
        """Until one more process has ended."""
        while all(process.poll() is None for _, process in self._running):
            time.sleep(_POLL_S)
        ended = next(entry for entry in self._running if entry[1].poll() is not None)
        self._running.remove(ended)
        part, process = ended
        if process.returncode:
            raise LaunchError(
                f"a measurement failed: {part.axis or part.command} of {part.output.name}",
                found=f"exit status {process.returncode}", path=part.output,
                remedy="Its message is above. The same command goes on where it was.",
            )  # fmt: skip


def _tables(parts: Sequence[_Part]) -> str:
    from trt_redknot.evaluation.markdown import groups_markdown, overall_markdown
    from trt_redknot.evaluation.merging import read_results
    from trt_redknot.evaluation.summary import Summary, summarise

    def together(chosen: Sequence[_Part]) -> Summary:
        return summarise(*read_results([part.output for part in chosen]), Evidence.MEASURED)

    lengths = together([part for part in parts if part.axis is None])
    texts = ["## Default policy by length\n", groups_markdown(lengths, "policy", "file")]
    texts += ["## Default policy by kind of question\n", groups_markdown(lengths, "policy", "kind")]
    for axis in dict.fromkeys(part.axis for part in parts if part.axis is not None):
        texts += [f"## {axis}\n", overall_markdown(together([part for part in parts if part.axis == axis]), axis)]
    return "\n".join(texts)


def _engine(directory: Path, checkpoint: Path, *more: object) -> None:
    if not directory.exists():
        _call(build_engine_command(None), "--checkpoint", checkpoint, "--output", directory, *more)


def _call(command: click.Command, *arguments: object) -> None:
    command.main([str(argument) for argument in arguments], standalone_mode=False)
