"""A server as a child process: signals to end reach it, and nothing of it is left when it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from trt_redknot.cli.command import INTERRUPTED
from trt_redknot.errors import LaunchError
from trt_redknot.serving.ending import FrontEnds
from trt_redknot.serving.parent import adopting, children, die_with_parent, end_children

# Ctrl-C: seconds that the front ends get to fail what is open and to end their ranks, and that the server gets to send
# the last answers after that.
_END_S = 12.0
_LAST_ANSWERS_S = 0.3
# Seconds that processes of a server that is gone get to end by themselves: after Ctrl-C, and else.
_CUT_S, _GONE_S = 1.0, 30.0


def run_until_ended(
    command: Sequence[str], environment: Mapping[str, str], server: Path, front_ends: FrontEnds | None = None
) -> int:
    """Run a server to its end: signals to end go to it, and it is ended when this process dies.

    SIGTERM and SIGHUP let it finish what is open; a SIGHUP that is ignored, as under nohup, stays so. SIGINT ends it at
    once: the front ends fail what is open and end their ranks, and then nothing is left to wait for.

    Args:
        server: the program that is told to end; `command` is it, or starts it.
        front_ends: those of the server.

    Returns:
        its exit status; 128 + the signal where one ended it; 130 after SIGINT.

    Raises:
        LaunchError: it cannot be started.
    """
    run = _Run(server, front_ends)
    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    before = {number: signal.signal(number, run.tell) for number in ending}
    try:
        with adopting():
            process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent(),
                # A terminal sends Ctrl-C to its whole foreground group. Whom it reaches here is ours to decide.
                process_group=0,
            )  # fmt: skip
            status = run.wait(process)
    except OSError as error:
        raise LaunchError(f"the server cannot be started: {error.strerror or error}", path=command[0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if run.interrupted:
        return INTERRUPTED
    return status if status >= 0 else 128 - status


class _Run:
    """A running server and the signals for it."""

    def __init__(self, server: Path, front_ends: FrontEnds | None) -> None:
        self.interrupted = False
        self._told = False
        self._server = server
        self._front_ends = front_ends
        self._started: list[int] = []
        self._others = children()
        self._ended = threading.Event()
        self._cut: threading.Thread | None = None

    def tell(self, number: int, frame: FrameType | None) -> None:
        """The handler of a signal."""
        if number != signal.SIGINT:
            self._told = True
            self._send(signal.SIGTERM)
        elif self.interrupted:
            # Who presses Ctrl-C twice does not want to wait for anything.
            self._send(signal.SIGKILL)
        else:
            self.interrupted = True
            if self._started:
                self._begin_cut()

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The status of the server, once nothing of it is left."""
        self._started.append(process.pid)
        if self._told:
            self._send(signal.SIGTERM)
        if self.interrupted and self._cut is None:
            self._begin_cut()
        status = process.wait()
        self._started.clear()
        self._ended.set()
        if self._cut is not None:
            self._cut.join()
        end_children(self._others, _CUT_S if self.interrupted else _GONE_S)
        return status

    def _begin_cut(self) -> None:
        self._cut = threading.Thread(target=self._cut_short)
        self._cut.start()

    def _cut_short(self) -> None:
        if self._front_ends is not None:
            self._front_ends.end(_END_S)
        # Told to end, Triton would wait for clients that keep their connection, and it has nothing to tell them.
        if not self._ended.wait(_LAST_ANSWERS_S):
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for pid in list(self._started):
            # Told by mpirun to end, the server would not get to finish what is open.
            with contextlib.suppress(ProcessLookupError):
                os.kill(_running(self._server, pid) or pid, number)


def _running(program: Path, parent: int) -> int | None:
    """The child of `parent` that runs `program`."""
    # A process that ends at this moment takes its folder along.
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                if Path(f"/proc/{child}/exe").samefile(program):
                    return int(child)
    return None
