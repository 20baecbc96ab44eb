"""The edge to the shell: one-line errors, exit statuses, interrupts, closed pipes, and the same under MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from trt_redknot.cli.command import INTERRUPTED, run_command
from trt_redknot.cli.main import LazyGroup, cli
from trt_redknot.errors import CollectiveError, ConfigError, RedKnotError
from trt_redknot.launch import run_ranks

RANK_SCRIPT = """
import sys
from trt_redknot.cli.command import run_command
from trt_redknot.errors import CollectiveError, ConfigError, StoreError
from trt_redknot.launch import world_communicator

world = world_communicator()
mode, rank = sys.argv[1], world.Get_rank()

def command():
    print("result")
    if mode == "all":
        raise ConfigError("a bad key", expected="4", found="5")
    if mode == "cause":
        raise StoreError("the disk is gone", path="a/b") if rank == 1 else CollectiveError("rank 1 failed")
    if mode == "alone":
        if rank == 1:
            raise ConfigError("a bad key")
        world.Barrier()
    if mode == "bug":
        if rank == 1:
            raise ZeroDivisionError("a bug")
        world.Barrier()

run_command(command, world, grace_s=2.0)
"""


def python(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def status_of(command: Callable[[], int | None]) -> int:
    with pytest.raises(SystemExit) as left:
        run_command(command)
    assert isinstance(left.value.code, int)
    return left.value.code


def raising(error: BaseException) -> Callable[[], int | None]:
    def command() -> int | None:
        raise error

    return command


@pytest.mark.parametrize(
    "error", [ConfigError("a bad key", expected=1, found=2, remedy="Fix it."), CollectiveError("x")]
)
def test_known_errors_are_one_line_and_their_status(error: RedKnotError, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(raising(error)) == error.exit_code
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""


@pytest.mark.parametrize("status", [0, 1, 7])
def test_status_of_the_command_is_kept(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: status) == status
    assert capsys.readouterr().err == ""


def test_nothing_returned_is_success() -> None:
    assert status_of(lambda: None) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_has_no_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(raising(error)) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_usage_error_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @click.option("--count", type=int)
    def command(count: int) -> None:
        raise AssertionError("not reached")

    assert status_of(lambda: command.main(["--count", "many"], prog_name="tool", standalone_mode=False)) == 2
    error = capsys.readouterr().err
    assert "Usage: tool [OPTIONS]" in error
    assert "'many' is not a valid integer" in error


def test_a_bug_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_command(raising(ZeroDivisionError("a bug")))


def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(
        "from trt_redknot.cli.command import run_command\n"
        "def command():\n    for number in range(200000):\n        print('line', number)\n"
        "run_command(command)\n",
        encoding="utf-8",
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1


@pytest.mark.parametrize("made", [Path.stat, Path.mkdir, Path.read_bytes])
def test_what_the_system_refuses_is_one_line(
    made: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("x" * 5000)

    def command() -> None:
        made(path)

    assert status_of(command) == 2
    assert capsys.readouterr().err == f"error: the operating system refused: File name too long, in {path}\n"


def _shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | environment,
    )  # fmt: skip


def test_a_full_disk_under_stdout_is_one_line() -> None:
    for command in ("version", "--help"):
        ended = _shell(f'"$1" -m trt_redknot {command} > /dev/full')
        assert (ended.returncode, ended.stderr) == (2, "error: the operating system refused: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_stop_a_command(closed: str) -> None:
    ended = _shell(f'"$1" -m trt_redknot version {closed}')
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_stdout_without_the_characters_of_a_result_shows_them_escaped() -> None:
    code = "from trt_redknot.cli.command import run_command; run_command(lambda: print('caf\\xe9 \\udcff'))"
    for encoding, shown in (("ascii:strict", "caf\\xe9 \\udcff\n"), ("utf-8:strict", "caf\xe9 \\udcff\n")):
        ended = _shell(f'"$1" -c "{code}"', PYTHONIOENCODING=encoding)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, shown, "")


def test_help_lists_every_command_and_names_the_scripts() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    for word in ("artifacts", "doctor", "version", "Examples:", "build_engine.py", "mpirun"):
        assert word in result.output


def test_every_listed_command_can_be_imported_and_has_help() -> None:
    assert isinstance(cli, LazyGroup)
    with click.Context(cli) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            assert command is not None
            assert command.help
            assert CliRunner().invoke(command, ["--help"]).exit_code == 0


def test_help_does_not_wait_for_torch() -> None:
    finished = python("-c", "import sys, trt_redknot.cli.main; sys.exit('torch' in sys.modules)")
    assert finished.returncode == 0, finished.stderr


def test_module_runs_and_refuses_unknown_commands() -> None:
    assert "trt-redknot" in python("-m", "trt_redknot", "version").stdout
    refused = python("-m", "trt_redknot", "nonsense")
    assert refused.returncode == 2
    assert "No such command 'nonsense'" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.fixture
def rank_script(tmp_path: Path) -> str:
    path = tmp_path / "ranks.py"
    path.write_text(RANK_SCRIPT, encoding="utf-8")
    return str(path)


def test_ranks_print_a_shared_error_once(rank_script: str) -> None:
    finished = run_ranks(2, [rank_script, "all"], timeout_s=60)
    assert finished.returncode == ConfigError.exit_code
    assert finished.stderr.count("error: a bad key, expected 4, found 5") == 1
    assert "(rank" not in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout.split() == ["result"]


def test_the_cause_is_told_and_not_its_echo(rank_script: str) -> None:
    finished = run_ranks(2, [rank_script, "cause"], timeout_s=60)
    assert finished.returncode == 2
    assert "error: the disk is gone, in a/b (rank 1)" in finished.stderr
    assert "rank 1 failed" not in finished.stderr


def test_a_rank_that_fails_alone_ends_the_job(rank_script: str) -> None:
    finished = run_ranks(2, [rank_script, "alone"], timeout_s=60)
    assert finished.returncode == ConfigError.exit_code
    assert "error: a bad key (rank 1, the other ranks are stopped)" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_bug_on_one_rank_ends_the_job_with_its_traceback(rank_script: str) -> None:
    finished = run_ranks(2, [rank_script, "bug"], timeout_s=60)
    assert finished.returncode != 0
    assert "ZeroDivisionError: a bug" in finished.stderr


def test_ranks_that_succeed_leave_with_zero(rank_script: str) -> None:
    finished = run_ranks(2, [rank_script, "none"], timeout_s=60)
    assert (finished.returncode, finished.stdout.split(), finished.stderr) == (0, ["result"], "")
