"""The edge between a command and the shell: errors become one line and an exit status, on one rank or on many."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import click
import numpy as np

from trt_redknot.errors import CollectiveError, RedKnotError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

INTERRUPTED = 130
GRACE_S = 10.0
_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How a command ended: `message` goes to stderr; `derived` marks one that only repeats another rank's fault."""

    code: int
    message: str = ""
    derived: bool = False


def run_command(
    command: Callable[[], int | None], comm: Intracomm | None = None, *, grace_s: float = GRACE_S
) -> NoReturn:
    """Run `command` and leave the process with its exit status (None is 0).

    A :class:`RedKnotError` becomes one line ``error: ...`` on stderr and the error's `exit_code`; so does what the
    operating system refuses (a name that is too long, a folder without permission, a full disk under stdout). A usage
    error of click is shown with its usage line; an interrupt leaves with 130; a closed pipe ends quietly. Any other
    exception is a bug and keeps its traceback.

    With a communicator every rank must call this. Standard output belongs to rank 0. When the ranks fail together the
    error is printed once and all leave with the same status; when one fails alone it prints its error and aborts the
    job, so that the others, which may wait for it in a collective, do not hang.

    Args:
        grace_s: seconds that a rank that failed waits for the others to end before it takes the whole job down.
    """
    _make_streams_whole()
    if comm is None or comm.Get_size() == 1:
        outcome = _attempt(command)
        _print_error(outcome.message)
        sys.exit(outcome.code)
    _run_rank(command, comm, grace_s)


def _run_rank(command: Callable[[], int | None], comm: Intracomm, grace_s: float) -> NoReturn:
    from mpi4py import MPI
    from mpi4py.run import set_abort_status

    # Outcomes travel on a communicator of their own: a collective that the command left unfinished cannot meet them.
    control = comm.Dup()
    try:
        with _stdout_of_rank_zero(control.Get_rank()):
            outcome = _attempt(command)
    except BaseException:
        # The interpreter prints the traceback; MPI then ends the job instead of waiting for ranks that wait for us.
        set_abort_status(1)
        raise
    codes = np.empty(control.Get_size(), dtype=np.int32)
    agreed = control.Iallgather(np.array([outcome.code], dtype=np.int32), codes)
    deadline = time.monotonic() + grace_s if outcome.code else float("inf")
    while not agreed.Test():
        if time.monotonic() > deadline:
            _print_error(f"{outcome.message.rstrip()} (rank {control.Get_rank()}, the other ranks are stopped)")
            MPI.COMM_WORLD.Abort(outcome.code)
        time.sleep(_POLL_S)
    if not codes.any():
        sys.exit(0)
    # Here, because it brings torch along, which an answer to --help need not wait for.
    from trt_redknot.collectives.mpi import exchange_bytes

    replies = exchange_bytes(control, json.dumps(dataclasses.asdict(outcome)).encode())
    code, message = _merge([_Outcome(**json.loads(reply)) for reply in replies])
    if control.Get_rank() == 0:
        _print_error(message)
    # Finished ranks cannot be aborted, so the status below reaches the launcher without MPI's own abort notice.
    MPI.Finalize()
    sys.exit(code)


def _attempt(command: Callable[[], int | None]) -> _Outcome:
    try:
        code = command() or 0
        sys.stdout.flush()
    except RedKnotError as error:
        return _Outcome(code=error.exit_code, message=f"error: {error}", derived=isinstance(error, CollectiveError))
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(file=shown)
        return _Outcome(code=error.exit_code, message=shown.getvalue().rstrip())
    except (KeyboardInterrupt, click.Abort):
        return _Outcome(code=INTERRUPTED, message="interrupted")
    except BrokenPipeError:
        _drop_stdout()
        return _Outcome(code=1)
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            _drop_stdout()
        refusal = _refusal(error)
        return _Outcome(code=refusal.exit_code, message=f"error: {refusal}")
    return _Outcome(code=code)


def _refusal(error: OSError) -> RedKnotError:
    reason = error.strerror or str(error) or type(error).__name__
    where = None if error.filename is None else os.fsdecode(error.filename)
    return RedKnotError(f"the operating system refused: {reason}", path=where)


def _make_streams_whole() -> None:
    """Give the process the standard streams that its starter closed, and a stdout that can print every text.

    The file that is opened first gets the number of a closed stream, and what libraries print would go into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    # What is still buffered would fail again when the interpreter flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _merge(outcomes: list[_Outcome]) -> tuple[int, str]:
    """The job's status and its message: causes before echoes, each once, with its ranks where the ranks differ."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.code]
    causes = [rank for rank in failed if not outcomes[rank].derived] or failed
    ranks_of: dict[str, list[int]] = {}
    for rank in causes:
        if outcomes[rank].message:
            ranks_of.setdefault(outcomes[rank].message, []).append(rank)
    lines = [
        message if len(ranks) == len(outcomes) else f"{message} (rank {', '.join(map(str, ranks))})"
        for message, ranks in ranks_of.items()
    ]
    return outcomes[causes[0]].code, "\n".join(lines)


def _print_error(message: str) -> None:
    if not message:
        return
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stdout_of_rank_zero(rank: int) -> Iterator[None]:
    if rank == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
