"""Processes that must not outlive what started them: `python -m trt_redknot.serving.parent COMMAND...` is one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from trt_redknot.cli.command import run_command
from trt_redknot.errors import LaunchError
from trt_redknot.serving.socket import readable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERMINATE_S = 2.0
_POLL_S = 0.02
# A process that cannot wind its alarm for so long is ended by the kernel.
_ALARM_S = 20.0
_WIND_S = 5.0


def die_with_parent() -> Callable[[], None]:
    """What makes the process that calls it get SIGTERM when its parent dies; it survives `exec`. For `preexec_fn`."""
    # Looked up before the fork: between fork and exec nothing may be loaded.
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Within it, processes whose parent dies become children of this one if they descend from it, instead of init's."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children() -> set[int]:
    """Processes that this one started or adopted, and that have not been waited for."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        # A thread that ends at this moment takes its folder along.
        with contextlib.suppress(OSError):
            found.update(map(int, (thread / "children").read_text(encoding="ascii").split()))
    return found


def end_children(others: Set[int], patience_s: float) -> None:
    """Wait for all children but `others`: `patience_s`, then they are asked to end, then they are killed."""
    for action, wait_s in ((None, patience_s), (signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _TERMINATE_S)):
        deadline = time.monotonic() + wait_s
        told: set[int] = set()
        while left := children() - others:
            for pid in left:
                if action is not None and pid not in told:
                    told.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, action)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)


def end_with_parent(close: Callable[[], None]) -> None:
    """Once this process's parent is dead, call `close` in a thread and end this process.

    A stub whose server is killed can hang in a message to it and hold the interpreter's lock, so that no thread of it
    runs any more. Hence an alarm that a thread keeps winding: when nobody winds it, the kernel ends the process.
    """
    parent = os.pidfd_open(os.getppid())

    def watch() -> None:
        while True:
            signal.setitimer(signal.ITIMER_REAL, _ALARM_S)
            if readable(parent, _WIND_S):
                break
        close()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _main() -> int:
    command = sys.argv[1:]
    if not command:
        raise LaunchError("a command is missing", expected="python -m trt_redknot.serving.parent COMMAND...")
    die_with_parent()()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise LaunchError(f"the command cannot be started: {error.strerror}", path=command[0]) from error


if __name__ == "__main__":
    run_command(_main)
