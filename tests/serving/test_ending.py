"""The launcher's word to its front ends, and processes that outlive their server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.triton import ROOT, alive, heed_hangup
from trt_redknot.serving.ending import VARIABLE, FrontEnds, end_on_word


def test_front_ends_end_at_the_launchers_word_and_it_waits_for_them() -> None:
    front_ends = FrontEnds()
    closing, may_end = [threading.Event() for _ in range(2)], threading.Event()

    def closer(event: threading.Event) -> None:
        event.set()
        assert may_end.wait(60)

    followers = [end_on_word(front_ends.environment, lambda event=event: closer(event)) for event in closing]
    while front_ends.connected < len(closing):
        assert not any(event.is_set() for event in closing)
    # Nobody has said anything yet: nothing to wait for.
    followers[0]()
    ending = threading.Thread(target=front_ends.end, args=(60.0,))
    ending.start()
    assert all(event.wait(60) for event in closing)
    assert ending.is_alive()
    may_end.set()
    for follow in followers:
        follow()
    ending.join(60)
    assert not ending.is_alive()
    front_ends.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_service_that_cannot_close_is_not_waited_for() -> None:
    def fails() -> None:
        raise RuntimeError("a rank does not answer")

    front_ends = FrontEnds()
    follow = end_on_word(front_ends.environment, fails)
    while not front_ends.connected:
        pass
    ending = threading.Thread(target=front_ends.end, args=(600.0,))
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    follow()
    front_ends.close()


def test_front_ends_live_on_where_there_is_no_launcher(tmp_path: Path) -> None:
    closed: list[int] = []
    for environment in ({}, {VARIABLE: str(tmp_path / "gone.sock")}):
        end_on_word(environment, lambda: closed.append(1))()
    front_ends = FrontEnds()
    follow = end_on_word(front_ends.environment, lambda: closed.append(1))
    while not front_ends.connected:
        assert not closed
    front_ends.close()
    follow()
    assert closed == []


def test_processes_that_outlive_their_server_are_ended() -> None:
    """The server's child is told to end and does not listen; its launcher leaves when it is gone."""
    program = """
import os, sys, time
from pathlib import Path
from trt_redknot.serving import running
running._GONE_S = 0.1
child = "trap '' TERM; echo $$; while :; do sleep 0.05; done"
command = ["/bin/sh", "-c", f'/bin/sh -c "$0" & sleep 0.5', child]
raise SystemExit(running.run_until_ended(command, os.environ, Path("/bin/sh")))
"""
    launcher = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert launcher.returncode == 0
    assert not alive(int(launcher.stdout))
    assert os.getpid() != int(launcher.stdout)


@pytest.mark.parametrize(("before", "status"), [("", 143), ("trap '' HUP; ", 0)])
def test_a_terminal_that_goes_ends_a_server_unless_nohup_says_otherwise(before: str, status: int) -> None:
    program = """
import os
from pathlib import Path
from trt_redknot.serving.running import run_until_ended
command = ["/bin/sh", "-c", 'echo up; for _ in 1 2 3 4 5 6 7 8; do sleep 0.05; done']
raise SystemExit(run_until_ended(command, os.environ, Path("/bin/sh")))
"""
    launcher = subprocess.Popen(
        ["/bin/sh", "-c", f'{before}exec "$@"', "sh", sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
        cwd=ROOT, preexec_fn=heed_hangup,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "up\n"
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(60) == status
    launcher.stdout.close()
