"""Other processes for tests: forked, so that a trial takes milliseconds, and ended in any way a test likes."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable

_POLL_S = 0.002


class Child:
    """A forked process that runs `work` and leaves with status 0, or 1 with a traceback.

    Args:
        work: is handed a function that tells the parent (see :meth:`wait_for_signal`) that a point was reached.
        quiet: an exception that is part of the test and leaves with status 1 without a traceback.
    """

    def __init__(
        self, work: Callable[[Callable[[], None]], object], *, quiet: type[BaseException] | None = None
    ) -> None:
        self._told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                work(lambda: os.write(tell, b"x") and None)
                status = 0
            except BaseException as error:  # noqa: BLE001 - the child must not return into the test
                if quiet is None or not isinstance(error, quiet):
                    traceback.print_exc()
            finally:
                os._exit(status)
        os.close(tell)
        self._status: int | None = None

    def wait_for_signal(self, timeout_s: float = 20.0) -> None:
        ready, _, _ = select.select([self._told], [], [], timeout_s)
        assert ready, "the child never got there"
        assert os.read(self._told, 1) == b"x", "the child ended before it got there"

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Exit status, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                os.close(self._told)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError("the child hangs")
            else:
                time.sleep(_POLL_S)
        return self._status
