"""Real Triton servers for tests: started on free ports, watched process by process, ended without a rest."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from trt_redknot.artifacts.names import LEASE_LOCK
from trt_redknot.errors import LaunchError
from trt_redknot.serving.triton_client import TritonClient
from trt_redknot.serving.triton_install import find_triton

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0
POLL_S = 0.05


def require_triton() -> None:
    """Skip where no Triton server can be had, and say so."""
    pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed (requirements/triton.txt)")
    try:
        find_triton()
    except LaunchError as error:
        pytest.skip(f"no Triton server: {error}")


def heed_hangup() -> None:
    """Whoever runs the tests with nohup has told all processes under it to ignore this signal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def descendants(pid: int) -> dict[int, str]:
    """Command lines of a process and everything below it."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            number = int(folder.name)
            parents[number] = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            commands[number] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    found = {pid} & set(commands)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {number: commands[number] for number in sorted(found) if alive(number)}


def wait_until_gone(pids: Mapping[int, str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while (left := {pid: command for pid, command in pids.items() if alive(pid)}) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    assert not left, f"still there after {timeout_s:g} s: {left}"


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held_leases(pids: Mapping[int, str]) -> list[str]:
    """Lease locks that these processes hold open."""
    found = []
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(entry)
                if target.endswith(LEASE_LOCK):
                    found.append(target)
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True, kw_only=True)
class TritonServer:
    """A server that runs/serve_triton.sh has started."""

    launcher: subprocess.Popen[bytes]
    log: Path
    http: int
    grpc: int
    metrics: int

    @property
    def client(self) -> TritonClient:
        return TritonClient(f"http://127.0.0.1:{self.http}", timeout_s=60.0)

    def processes(self, name: str = "") -> dict[int, str]:
        """Those whose command line has `name`, by number."""
        return {pid: command for pid, command in descendants(self.launcher.pid).items() if name in command}

    def ranks(self) -> list[int]:
        """The service's ranks, which are no Triton process."""
        return [pid for pid, line in self.processes("trt_redknot.serving").items() if "prterun" not in line
                and "mpirun" not in line and "triton_launch" not in line and "tritonserver" not in line]  # fmt: skip

    def post(self, path: str, content: object) -> tuple[int, bytes]:
        """Status and body of an HTTP request of any content."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=60.0)
        with contextlib.closing(connection):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            connection.request("POST", path, body=body)
            response = connection.getresponse()
            return response.status, response.read()

    def tail(self, count: int = 6000) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-count:]

    def stop(self, timeout_s: float = STOP_S) -> int:
        """End it as an operator would; its exit status. No process of it is left."""
        processes = self.processes()
        self.launcher.send_signal(signal.SIGTERM)
        status = self.launcher.wait(timeout_s)
        wait_until_gone(processes, timeout_s)
        return status


def start_server(folder: Path, engine: Path, store: Path, *options: str) -> TritonServer:
    """Start and wait until the model is ready. The log is printed where that fails."""
    for attempt in range(3):
        http, grpc, metrics = free_ports(3)
        log = folder / f"triton-{http}.log"
        command = [
            str(ROOT / "run" / "serve_triton.sh"), "--engine", str(engine), "--store", str(store), "--exit-timeout-s",
            "30", "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics), *options,
        ]  # fmt: skip
        with log.open("wb") as file:
            launcher = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        server = TritonServer(launcher=launcher, log=log, http=http, grpc=grpc, metrics=metrics)
        if _becomes_ready(server):
            return server
        processes = server.processes()
        launcher.kill()
        launcher.wait(STOP_S)
        wait_until_gone(processes, STOP_S)
        # Between choosing a port and listening on it somebody else may have taken it.
        if "in use" not in server.tail() or attempt == 2:
            pytest.fail(f"the server did not start:\n{server.tail()}")
    raise AssertionError("unreachable")


def _becomes_ready(server: TritonServer) -> bool:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.launcher.poll() is None:
        with contextlib.suppress(LaunchError):
            if server.client.ready():
                return True
        time.sleep(POLL_S)
    return False


@contextlib.contextmanager
def triton_server(folder: Path, engine: Path, store: Path, *options: str) -> Iterator[TritonServer]:
    """A server for the time of a `with`; it, and whatever it started, is gone afterwards."""
    server = start_server(folder, engine, store, *options)
    started = server.processes()
    try:
        yield server
    except BaseException:
        print(server.tail())
        raise
    finally:
        started |= server.processes()
        if server.launcher.poll() is None:
            server.launcher.send_signal(signal.SIGTERM)
            try:
                server.launcher.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.launcher.kill()
                server.launcher.wait(STOP_S)
        wait_until_gone(started, STOP_S)
