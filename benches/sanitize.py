"""compute-sanitizer over small launches of every op, as one table: `python -m benches.sanitize`, on a GPU.

One process a case and tool, several at a time (`benches/small_launches.py` has the cases). Tensors have allocations of
their own, so that the tools see where each ends. Controls do what a tool has to report: a tool that finds nothing in
them followed no kernel, and its other lines say nothing.

Under racecheck kernels whose blocks wait for each other take the libraries of `make tools`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benches.small_launches import CASES, CONTROLS, WAITING

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "initcheck", "racecheck")
# The tool follows our kernels alone; what it leaves with when it reports something.
FOLLOWED, REPORTED = "kns=redknot", 99
KEPT_TEXT = 4000

Verdict = Literal["clean", "REPORTED", "reported", "BLIND", "TIMED OUT", "FAILED", "not run"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One tool over one case.

    Attributes:
        verdict: `reported` is right for a control, and `BLIND` is a control of which nothing was said; `FAILED` is a
            process that ended without the tool's summary, or in an error of its own.
        text: the beginning of what was printed, where the verdict is not right.
    """

    case: str
    tool: str
    verdict: Verdict
    seconds: float = 0.0
    text: str = ""

    @property
    def right(self) -> bool:
        return self.verdict in ("clean", "reported")


def verdict_of(status: int, printed: str, *, control: bool) -> Verdict:
    """What a tool's exit status and its summary say together; where they disagree, the process failed."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", printed)
    if summary is None:
        return "FAILED"
    found = int(summary[1])
    if control:
        return "reported" if found and status == REPORTED else "BLIND"
    if found:
        return "REPORTED"
    return "clean" if status == 0 else "FAILED"


def run_case(case: str, tool: str, *, sanitizer: Path, timeout: float, resting: Path, running: set[int]) -> Run:
    """Follow one case with one tool, in a process of its own.

    Args:
        timeout: seconds after which the process is ended.
        resting: folder of the libraries for cases whose blocks wait.
        running: process groups that run; this one's is among them meanwhile.
    """
    command = [str(sanitizer), "--tool", tool, "--kernel-name", FOLLOWED, "--error-exitcode", str(REPORTED)]
    command += [sys.executable, "-m", "benches.small_launches", case]
    if tool == "racecheck" and case in WAITING:
        if not (resting / "libredknot_kernels.so").is_file():
            return Run(case=case, tool=tool, verdict="not run", text=f"no libraries in {resting}: make tools")
        command += ["--library", str(resting)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A session of its own: the tool starts the process that it follows, and both are ended together.
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:  # fmt: skip
            running.add(process.pid)
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = None
            finally:
                running.discard(process.pid)
        output.seek(0)
        printed = output.read()
    seconds = time.monotonic() - begin
    verdict: Verdict = "TIMED OUT" if status is None else verdict_of(status, printed, control=case in CONTROLS)
    right = verdict in ("clean", "reported")
    return Run(case=case, tool=tool, verdict=verdict, seconds=seconds, text="" if right else printed[:KEPT_TEXT])


def run_all(
    pairs: Sequence[tuple[str, str]], run: Callable[[str, str], Run], *, jobs: int, running: set[int]
) -> list[Run]:
    """All pairs of case and tool, in their order, `jobs` at a time. Interrupted, it ends what is `running`."""
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("compute-sanitizer", total=len(pairs))

        def one(pair: tuple[str, str]) -> Run:
            found = run(*pair)
            progress.advance(task)
            return found

        try:
            return list(pool.map(one, pairs))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(running):
                os.killpg(group, signal.SIGKILL)
            raise


def table_of(runs: Sequence[Run], title: str) -> Table:
    """A line a case, a column a tool."""
    table = Table(title=title)
    tools = [tool for tool in TOOLS if any(run.tool == tool for run in runs)]
    for column in ("case", *tools):
        table.add_column(column)
    by_case: dict[str, dict[str, Run]] = {}
    for run in runs:
        by_case.setdefault(run.case, {})[run.tool] = run
    for case, found in by_case.items():
        table.add_row(case, *(_cell(found.get(tool)) for tool in tools))
    return table


def _cell(run: Run | None) -> str:
    if run is None:
        return "-"
    return run.verdict if run.verdict == "not run" else f"{run.verdict}, {run.seconds:.0f} s"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="left out: all; small_launches --list names them")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="run only these")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time [%(default)s]"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of one process [%(default)s]")
    parser.add_argument(
        "--resting", type=Path, default=ROOT / "build" / "tools" / "lib", metavar="DIR",
        help="the libraries of `make tools` [build/tools/lib]",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write the runs, with what was reported, to this file")
    arguments = parser.parse_args(argv)
    for name in arguments.cases:
        if name not in CASES:
            parser.error(f"{name!r} is no case, small_launches --list names them")
    if arguments.jobs < 1:
        parser.error(f"--jobs: expected at least 1, found {arguments.jobs}")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        parser.error("compute-sanitizer is not on PATH: it comes with the CUDA toolkit (its bin folder)")
    wanted = arguments.cases or list(CASES)
    pairs = [(case, tool) for case, tool in CONTROLS.items() if tool in arguments.tools]
    pairs += [(case, tool) for case in wanted for tool in arguments.tools]
    # The longest ones first: nothing waits for them at the end.
    pairs.sort(key=lambda pair: not (pair[0] in WAITING and pair[1] == "racecheck"))
    running: set[int] = set()

    def run(case: str, tool: str) -> Run:
        return run_case(
            case, tool, sanitizer=Path(sanitizer), timeout=arguments.timeout, resting=arguments.resting.resolve(),
            running=running,
        )  # fmt: skip

    runs = run_all(pairs, run, jobs=arguments.jobs, running=running)
    for each in runs:
        if not each.right:
            print(f"--- {each.tool}, {each.case}: {each.verdict}\n{each.text}", file=sys.stderr)
    Console(width=120).print(table_of(runs, "compute-sanitizer over small launches"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in runs], indent=1) + "\n")
    return int(not all(each.right for each in runs))


if __name__ == "__main__":
    sys.exit(main())
