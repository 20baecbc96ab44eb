"""`python -m trt_redknot`: the group of commands, each imported when it is named, so that help is instant."""

from __future__ import annotations

import importlib
from typing import NoReturn

import click

from trt_redknot.cli.command import run_command

PROGRAM = "python -m trt_redknot"

# Command -> (module, attribute, one line of help). The help stands here so that the list needs no import.
_COMMANDS = {
    "artifacts": ("trt_redknot.cli.artifacts", "artifacts", "Build, list, inspect, verify and remove artifacts."),
    "doctor": ("trt_redknot.cli.doctor", "doctor", "Check this machine and say what to do about what is missing."),
    "version": ("trt_redknot.cli.version", "version", "Print the version of the package and of what it runs on."),
}


class LazyGroup(click.Group):
    """A click group whose commands are named by `_COMMANDS` and imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}.{attribute} is not a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in self.list_commands(ctx)])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  python -m trt_redknot doctor                                   what works on this machine
  python -m trt_redknot artifacts build --engine DIR --store DIR manual.txt notes.txt
  python -m trt_redknot artifacts ls --store DIR                 what the store holds
  python -m trt_redknot artifacts verify --store DIR --help      options of one command

\b
The other commands of the project are scripts, because MPI starts them on several ranks:
  python build_engine.py --help
  mpirun -n 2 python -m mpi4py run/generate.py --help            and the rest of run/
""",
)
def cli() -> None:
    """Document reuse for long prompts on DeepSeek-V4.

    A document is evaluated once and kept as an artifact. A request is a list of artifacts and fresh tokens: the engine
    recomputes the rows that need the new context and takes the rest from the artifacts.
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line of this process, or `arguments`; leaves the process."""
    from trt_redknot.launch import world_communicator

    def command() -> int | None:
        code: int | None = cli.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        return code

    run_command(command, world_communicator())


__all__ = ["cli", "main", "run_command"]
