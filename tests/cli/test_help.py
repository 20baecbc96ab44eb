"""Help is instant: no script and no command waits for torch before it says what its options are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.compare import compare_command
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.cli.main import cli
from trt_redknot.serving.__main__ import ranks
from trt_redknot.serving.bench.command import bench
from trt_redknot.serving.triton_probe import probe

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["build_engine.py", *(str(path.relative_to(ROOT)) for folder in ("run", "examples")
                                for path in sorted((ROOT / folder).glob("*.py")))]  # fmt: skip
# What takes seconds to import, or is not there where only the help is read.
HEAVY = ("torch", "transformers", "tokenizers", "tensorrt", "triton", "mpi4py")
# Runs each command in one interpreter in which nothing heavy can be imported; prints what each one said.
PROGRAM = """
import contextlib, io, json, os, runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ImportError(f"the help imports {name}")

HEAVY, commands = json.loads(sys.argv[1])
sys.meta_path.insert(0, Refuse())
said = []
for command in commands:
    out, status = io.StringIO(), None
    module = command[0] == "-m"
    sys.argv = command[1:] if module else command
    with contextlib.redirect_stdout(out):
        try:
            if module:
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
                runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
        except ImportError as error:
            status = str(error)
    said.append([status, out.getvalue()])
print(json.dumps(said))
"""


def paths(command: click.Command, context: click.Context, start: list[str]) -> list[list[str]]:
    """A command and everything below it, as what is typed."""
    found = [start]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found += paths(below, context, [*start, name])
    return found


def typed() -> list[list[str]]:
    context = click.Context(cli)
    scripts = [[script] for script in SCRIPTS if script != "run/evaluate.py"]
    return [
        *scripts,
        *paths(evaluate_command(None), context, ["run/evaluate.py"]),
        *paths(cli, context, ["-m", "trt_redknot"]),
        *paths(ranks, context, ["-m", "trt_redknot.serving"]),
        ["-m", "trt_redknot.serving.triton_launch"],
    ]


def test_the_list_has_every_script_and_command() -> None:
    assert {"run/generate.py", "run/train_nano.py", "run/bench_ttft.py", "examples/make_checkpoint.py"} <= set(SCRIPTS)
    assert ["-m", "trt_redknot", "artifacts", "build"] in typed()
    assert ["run/evaluate.py", "sweep"] in typed()


def test_ranges_of_numbers_hold_finite_ones() -> None:
    found = []
    for root in (cli, evaluate_command(None), build_engine_command(None), compare_command(None), bench, probe):
        pending: list[click.Command] = [root]
        while pending:
            command = pending.pop()
            pending += command.commands.values() if isinstance(command, click.Group) else []
            found += [each for each in command.params if isinstance(each.type, click.FloatRange)]
    assert {"budget", "tau", "gpu_memory", "rate", "timeout_s"} <= {each.name for each in found}
    for parameter in found:
        for value in ("nan", "inf", "-inf"):
            with pytest.raises(click.BadParameter):
                parameter.type.convert(value, parameter, None)


def test_help_imports_nothing_heavy() -> None:
    commands = [[*command, "--help"] for command in typed()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([HEAVY, commands])],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == len(commands)
    for command, (status, text) in zip(commands, said, strict=True):
        assert status == 0, (command, status)
        assert text.startswith("Usage: "), command


def test_the_refusal_works() -> None:
    """Else the test above could not fail."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([HEAVY, [["-m", f"{name}.nothing"] for name in HEAVY]])],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert [status for status, _ in json.loads(done.stdout)] == [f"the help imports {name}" for name in HEAVY]
