"""Triton over two ranks, in both modes: the same answers, and what happens when a process of it is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.support import ids, make_checkpoint
from tests.support.networks import build_engine, fp64
from tests.support.triton import TritonServer, require_triton, triton_server, wait_until_gone
from trt_redknot import Engine, Request, Tokens
from trt_redknot.errors import LaunchError
from trt_redknot.launch import run_ranks
from trt_redknot.serving.messages import ServingError, ServingFault, TokenEvent

ENDS_WITHIN_S = 30.0
MODES = ["orchestrator", "leader"]
QUESTION = {"max_new_tokens": 4, "stop_tokens": [], "reuse": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and an engine of it for two ranks and for one."""
    require_triton()
    folder = tmp_path_factory.mktemp("ranks")
    checkpoint = make_checkpoint(folder, seed=random.randrange(2**31))
    build_engine(checkpoint, folder / "one", options=fp64(chunk_rows=16, max_length=400))
    options = ["--dtype", "float64", "--chunk-rows", "16", "--max-length", "400"]
    built = run_ranks(
        2, ["build_engine.py", "--checkpoint", str(checkpoint), "--output", str(folder / "two"), *options],
        timeout_s=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(params=MODES)
def server(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[TritonServer]:
    with triton_server(tmp_path, folder / "two", tmp_path / "store", "--mode", request.param) as started:
        yield started


def check_answer(server: TritonServer, folder: Path) -> None:
    prompt = ids(11)
    expected = Engine.open(folder / "one").generate(Request(segments=[Tokens(prompt)], max_new_tokens=4, reuse=None,
                                                            stop_tokens=[]))  # fmt: skip
    found = server.client.whole({"segments": [{"tokens": prompt}], **QUESTION})
    assert found["tokens"] == list(expected.tokens)
    assert server.client.whole({"action": "health"})["world_size"] == 2


def test_a_killed_rank_fails_what_is_open_and_ends_the_others(server: TritonServer, folder: Path) -> None:
    check_answer(server, folder)
    leader = any("worker" in line for line in server.processes("serving worker").values())
    events = server.client.events({"segments": [{"tokens": ids(9)}], **QUESTION, "max_new_tokens": 300})
    assert isinstance(next(events), TokenEvent)
    ranks = {pid: server.processes()[pid] for pid in server.ranks()}
    everything = server.processes()
    os.kill(max(ranks), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ServingError) as caught:
        list(events)
    assert caught.value.fault is ServingFault.RANK_FAILED, caught.value
    assert time.monotonic() - started < ENDS_WITHIN_S
    if leader:
        # The server is a rank of the job, and ends with it.
        wait_until_gone(everything, ENDS_WITHIN_S)
        return
    wait_until_gone(ranks, ENDS_WITHIN_S)
    for request in ({"action": "health"}, {"segments": [{"tokens": [1]}]}):
        with pytest.raises(ServingError) as caught:
            server.client.whole(request)
        assert caught.value.fault is ServingFault.RANK_FAILED
    # Triton itself lives, and a reload brings the ranks back.
    assert server.post("/v2/repository/models/redknot/unload", {})[0] == 200
    deadline = time.monotonic() + ENDS_WITHIN_S
    while server.processes("triton_python_backend_stub") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.post("/v2/repository/models/redknot/load", {})[0] == 200
    check_answer(server, folder)
    assert server.stop() == 0


@pytest.mark.parametrize("server", ["leader"], indirect=True)
def test_a_killed_server_leaves_no_process(server: TritonServer) -> None:
    kill_server(server)


def kill_server(server: TritonServer) -> None:
    """SIGKILL to Triton itself, in the middle of an answer."""
    events = server.client.events({"segments": [{"tokens": ids(9)}], **QUESTION, "max_new_tokens": 300})
    assert isinstance(next(events), TokenEvent)
    everything = server.processes()
    victim = next(pid for pid, line in server.processes("bin/tritonserver").items() if "mpirun" not in line
                  and "prterun" not in line and "serving.parent" not in line)  # fmt: skip
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ServingError):
        list(events)
    wait_until_gone(everything, ENDS_WITHIN_S)
    with pytest.raises(LaunchError, match="does not answer"):
        server.client.ready()


def test_stop_and_start_again_and_a_kill(folder: Path, tmp_path: Path) -> None:
    """The default mode, in which the ranks are the model's children. The second server is killed."""
    for start in range(2):
        with triton_server(tmp_path, folder / "two", tmp_path / "store") as server:
            built = server.client.whole({"action": "build", "documents": [{"tokens": list(range(30))}]})
            if start == 0:
                assert server.stop() == 0
            else:
                kill_server(server)
    assert not built["report"]["documents"][0]["built"], "the second server found what the first had built"
