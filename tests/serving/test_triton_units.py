"""What of the Triton side needs no server: requests, settings, repository, installation, launcher, metrics."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from tests.support.triton import ROOT, free_ports, heed_hangup, wait_until_gone
from trt_redknot.errors import ConfigError, LaunchError, RequestError
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.messages import BuildRequest, DoneEvent, ServingError, ServingFault, ServingRequest, TokenEvent
from trt_redknot.serving.running import run_until_ended
from trt_redknot.serving.socket import MAX_TEMPORARY_BYTES
from trt_redknot.serving.triton import parse_request, read_parameters
from trt_redknot.serving.triton_client import TritonClient, failure_of
from trt_redknot.serving.triton_install import TritonInstall, find_triton
from trt_redknot.serving.triton_launch import Endpoints, leader_command, serve, server_command
from trt_redknot.serving.triton_metrics import MetricsMirror
from trt_redknot.serving.triton_probe import probe
from trt_redknot.serving.triton_repository import OWN_PARAMETERS, shipped_repository, write_repository

MODEL = ROOT / "triton" / "model_repository" / "redknot"


def test_a_request_says_what_is_wanted() -> None:
    generate = parse_request(b'{"segments": [{"tokens": [1]}]}', "triton-7")
    assert isinstance(generate, ServingRequest)
    assert (generate.request_id, generate.stream) == ("triton-7", True)
    build = parse_request(b'{"action": "build", "documents": [{"text": "x"}], "request_id": "own"}', "triton-7")
    assert isinstance(build, BuildRequest)
    assert build.request_id == "own"
    assert parse_request(b'{"action": "health"}', "") == "health"
    with pytest.raises(RequestError, match="expected generate or build or health"):
        parse_request(b'{"action": ["generate"]}', "x")


def model_config(**parameters: str) -> str:
    return json.dumps({"parameters": {name: {"string_value": value} for name, value in parameters.items()}})


def test_parameters_become_settings() -> None:
    mode, limit, config = read_parameters(model_config(engine="/e", store="/s", max_batch="3", mode="", verify="false"))
    assert (mode, limit, config.max_batch, config.verify) == ("orchestrator", 1800.0, 3, False)
    mode, limit, _ = read_parameters(model_config(engine="/e", store="/s", mode="leader", start_timeout_s="9.5"))
    assert (mode, limit) == ("leader", 9.5)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"engine": "/e"}, "key 'store' is missing"),
        ({"engine": "/e", "store": "/s", "colour": "red"}, "key 'colour' is unknown"),
        ({"engine": "/e", "store": "/s", "max_batch": "many"}, "key 'max_batch' is invalid"),
        ({"engine": "/e", "store": "/s", "mode": "both"}, "expected orchestrator or leader, found both"),
        ({"engine": "/e", "store": "/s", "start_timeout_s": "soon"}, "expected seconds, found soon"),
        ({"engine": "${engine}", "store": "/s"}, "not filled in"),
    ],
)
def test_wrong_parameters_are_told(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_parameters(model_config(**parameters))


def strings_of(config: str) -> dict[str, str]:
    return dict(re.findall(r'parameters: \{ key: "(\w+)" value: \{ string_value: "((?:[^"\\]|\\.)*)" \} \}', config))


def test_the_shipped_model_has_every_setting_and_no_other() -> None:
    found = strings_of((MODEL / "config.pbtxt").read_text(encoding="utf-8"))
    assert set(found) == {*OWN_PARAMETERS, *ServingConfig.model_fields}
    assert all(value == f"${{{name}}}" for name, value in found.items())
    assert shipped_repository() == MODEL.parent


def test_a_repository_is_filled_in(tmp_path: Path) -> None:
    odd = '/some "odd" \\ folder $HOME'
    target = write_repository(tmp_path / "models", {"engine": odd, "store": "/store", "max_batch": "4"})
    content = (target / "redknot" / "config.pbtxt").read_text(encoding="utf-8")
    found = {name: re.sub(r"\\(.)", r"\1", value) for name, value in strings_of(content).items()}
    assert found["engine"] == odd
    assert (found["store"], found["max_batch"], found["mode"], found["cache_tokens"]) == (
        "/store", "4", "orchestrator", "",
    )  # fmt: skip
    assert (target / "redknot" / "1" / "model.py").read_bytes() == (MODEL / "1" / "model.py").read_bytes()
    with pytest.raises(LaunchError, match="overwrite"):
        write_repository(target, {"engine": "/e", "store": "/s"})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"engine": "/e", "store": "/s", "max_batch": "0"}, "max_batch"),
        ({"engine": "/e", "store": "/s", "mode": "solo"}, "unknown mode"),
        ({"engine": "/e\n}", "store": "/s"}, "not printable"),
    ],
)
def test_wrong_settings_write_no_repository(tmp_path: Path, parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_repository(tmp_path / "models", parameters)
    assert not (tmp_path / "models").exists()


def fake_server(folder: Path, script: str = "exit 0") -> Path:
    """A Triton installation in which the server is a shell script."""
    for part in ("bin", "backends/python"):
        (folder / part).mkdir(parents=True)
    (folder / "backends" / "python" / "libtriton_python.so").touch()
    server = folder / "bin" / "tritonserver"
    server.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    return server


def test_a_server_is_found_by_name_or_told_to_be_missing(tmp_path: Path) -> None:
    server = fake_server(tmp_path / "triton")
    found = find_triton(server)
    assert (found.server, found.backends) == (server, tmp_path / "triton" / "backends")
    assert find_triton(server, tmp_path / "triton" / "backends") == found
    with pytest.raises(LaunchError, match="no Triton server was found"):
        find_triton(tmp_path / "nothing")
    with pytest.raises(LaunchError, match="no Triton server was found"):
        find_triton(tmp_path)
    with pytest.raises(LaunchError, match="no Python backend"):
        find_triton(server, tmp_path)


def test_the_environment_names_interpreter_and_libraries(tmp_path: Path) -> None:
    install = TritonInstall(
        server=tmp_path, backends=tmp_path, path=(tmp_path / "py",), libraries=(tmp_path / "lib", tmp_path / "more")
    )
    environment = install.environment({"PATH": "/bin", "LD_LIBRARY_PATH": "/own"})
    assert environment["PATH"].split(":") == [str(tmp_path / "py"), str(Path(sys.prefix) / "bin"), "/bin"]
    assert environment["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:{tmp_path}/more:/own"
    assert install.interpreter == tmp_path / "py" / "python3"
    assert install.environment({"PATH": "/bin"})["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:{tmp_path}/more"


def test_commands_of_both_modes(tmp_path: Path) -> None:
    install = TritonInstall(server=tmp_path / "tritonserver", backends=tmp_path / "backends")
    endpoints = Endpoints(host="::1", http=1, grpc=2, metrics=3)
    server = server_command(
        install, tmp_path / "models", endpoints, regions="ours.", exit_timeout_s=7, extra=["--log-verbose=1"]
    )
    assert server[0] == str(tmp_path / "tritonserver")
    assert {"--http-port=1", "--grpc-port=2", "--metrics-port=3", "--http-address=::1", "--exit-timeout-secs=7",
            "--model-control-mode=explicit", "--load-model=redknot", "--log-verbose=1",
            "--backend-config=python,shm-region-prefix-name=ours."} <= set(server)  # fmt: skip
    leader = leader_command(server, install, 4)
    colon = leader.index(":")
    assert leader[leader.index("-n") + 1] == "1"
    assert leader[colon - len(server) : colon] == server
    assert leader[colon + 1 : colon + 3] == ["-n", "3"]
    assert leader[-2:] == ["trt_redknot.serving", "worker"]
    assert ":" not in leader_command(server, install, 1)


def test_a_server_is_told_to_end_and_ends_with_its_launcher(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from trt_redknot.serving.running import run_until_ended
from trt_redknot.serving.socket import MAX_TEMPORARY_BYTES
print(os.getpid(), flush=True)
command = ["/bin/sh", "-c", "trap 'exit 7' TERM; echo $$; while :; do sleep 0.05; done"]
raise SystemExit(run_until_ended(command, os.environ, Path({str(tmp_path / "server")!r})))
"""
    for way, status in ((signal.SIGTERM, 7), (signal.SIGHUP, 7), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        launcher = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heed_hangup
        )
        assert launcher.stdout is not None
        assert int(launcher.stdout.readline()) == launcher.pid
        server = int(launcher.stdout.readline())
        launcher.send_signal(way)
        assert launcher.wait(30) == status
        wait_until_gone({server: "server"}, 30)
        launcher.stdout.close()


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be started"):
        run_until_ended([str(tmp_path / "none")], {}, tmp_path / "none")


def test_serve_checks_before_it_starts(engine_dir: Path, tmp_path: Path) -> None:
    server = fake_server(tmp_path / "triton", 'for each in "$@"; do echo "$each"; done; exit 3')
    common = ["--engine", str(engine_dir), "--store", str(tmp_path / "store"), "--server", str(server)]
    shown = CliRunner().invoke(serve, [*common, "--dry-run", "--set", "max_batch=5"], standalone_mode=False)
    assert shown.exception is None
    lines = shown.output.splitlines()
    assert lines[0].startswith(str(server))
    assert strings_of(shown.output)["max_batch"] == "5"
    assert strings_of(shown.output)["world_size"] == "1"
    assert strings_of(shown.output)["engine"] == str(engine_dir.resolve())
    for options, message in (
        (["--set", "max_batch=0"], "max_batch"),
        (["--set", "colour=red"], "colour"),
        (["--set", "max_batch"], "NAME=VALUE"),
        (["--set", "engine=/e"], "option of its own"),
        (["--server", str(tmp_path / "none")], "no Triton server"),
        (["--repository", str(engine_dir)], "overwrite"),
    ):
        refused = CliRunner().invoke(serve, [*common, *options], standalone_mode=False)
        assert message in str(refused.exception), (options, refused.output)
    models = tmp_path / "models"
    result = subprocess.run(
        [str(ROOT / "run" / "serve_triton.sh"), *common, "--repository", str(models), "--", "--log-verbose=1"],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert result.returncode == 3, result.stderr
    assert f"--model-repository={models}" in result.stdout
    assert "--log-verbose=1" in result.stdout
    assert (models / "redknot" / "config.pbtxt").is_file()


@pytest.mark.parametrize("room", [True, False])
def test_what_a_server_leaves_in_the_folder_for_temporary_files_goes_with_it(
    engine_dir: Path, tmp_path: Path, room: bool
) -> None:
    """A server that is ended while an engine loads removes nothing. Where the launcher's folder leaves no room for the
    path of a socket, the server uses the one that it would have used."""
    left = tmp_path / "left"
    script = f"""
mkdir "$TMPDIR/redknot-mpi-1"
echo "$TMPDIR" > {left}
trap "exit 5" TERM
while :; do sleep 0.05; done"""
    server = fake_server(tmp_path / "triton", script)
    with tempfile.TemporaryDirectory(prefix="t") as short:
        temporary = Path(short) if room else Path(short, "x" * (MAX_TEMPORARY_BYTES - 1 - len(os.fsencode(short))))
        temporary.mkdir(exist_ok=True)
        launcher = subprocess.Popen(
            [str(ROOT / "run" / "serve_triton.sh"), "--engine", str(engine_dir), "--store", str(tmp_path / "store"),
             "--server", str(server)],
            env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(temporary)},
        )  # fmt: skip
        while not (left.exists() and left.read_text(encoding="utf-8")):
            assert launcher.poll() is None
            time.sleep(0.02)
        used = Path(left.read_text(encoding="utf-8").strip())
        launcher.terminate()
        assert launcher.wait(30) == 5
        assert (used.parent if room else used) == temporary
        assert [path.name for path in temporary.iterdir()] == ([] if room else ["redknot-mpi-1"])


def test_the_script_explains_itself(tmp_path: Path) -> None:
    script = [str(ROOT / "run" / "serve_triton.sh")]
    shown = subprocess.run([*script, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "orchestrator|leader" in shown.stdout
    wrong = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (wrong.returncode, "Missing option '--engine'" in wrong.stderr) == (2, True)
    alone = subprocess.run(
        script, capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"},
    )  # fmt: skip
    assert (alone.returncode, "no Python that can import trt_redknot" in alone.stderr) == (2, True)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    without = subprocess.run(
        script, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"PYTHON": str(bare)}
    )
    assert without.returncode == 2
    assert without.stderr == (
        f"error: no Python that can import trt_redknot, tried {bare}. Run make venv, or set PYTHON.\n"
    )


class FakeMetric:
    def __init__(self) -> None:
        self.number = 0.0

    def value(self) -> float:
        return self.number

    def set(self, value: float) -> None:
        self.number = value

    def increment(self, value: float) -> None:
        assert value >= 0
        self.number += value


class FakeFamily:
    """As Triton's: a family is made once, and has one metric for a set of labels."""

    COUNTER, GAUGE = "counter", "gauge"
    made: ClassVar[dict[str, FakeFamily]] = {}

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert name not in self.made
        assert description
        self.made[name] = self
        self.kind = kind
        self.metrics: dict[str, FakeMetric] = {}

    def Metric(self, *, labels: dict[str, str]) -> FakeMetric:  # noqa: N802
        key = json.dumps(labels, sort_keys=True)
        assert key not in self.metrics
        return self.metrics.setdefault(key, FakeMetric())


def test_metrics_are_copied_and_counters_never_fall() -> None:
    FakeFamily.made.clear()
    text = """# HELP asked_total Asked.
# TYPE asked_total counter
asked_total{arm="reuse"} 3.0
asked_total{arm="recompute"} 1.0
# HELP depth Now.
# TYPE depth gauge
depth 4.0
# HELP wait_seconds Waited.
# TYPE wait_seconds histogram
wait_seconds_bucket{le="0.1"} 2.0
wait_seconds_bucket{le="+Inf"} 3.0
wait_seconds_count 3.0
wait_seconds_sum 1.5
"""
    texts = [text, text.replace("3.0", "5.0").replace("depth 4.0", "depth 0.0"), "", text]
    mirror = MetricsMirror(lambda: texts[0], type("Utils", (), {"MetricFamily": FakeFamily}), interval_s=3600)
    for _ in range(4):
        mirror.copy()
        texts.append(texts.pop(0))
    mirror.close()
    found = {name: {key: metric.number for key, metric in family.metrics.items()}
             for name, family in FakeFamily.made.items()}  # fmt: skip
    assert found["asked_total"] == {'{"arm": "reuse"}': 5.0, '{"arm": "recompute"}': 1.0}
    assert found["depth"] == {"{}": 4.0}
    assert found["wait_seconds_bucket"] == {'{"le": "0.1"}': 2.0, '{"le": "+Inf"}': 5.0}
    assert found["wait_seconds_sum"] == {"{}": 1.5}
    assert {name: family.kind for name, family in FakeFamily.made.items()} == {
        "asked_total": "counter", "depth": "gauge", "wait_seconds_bucket": "counter", "wait_seconds_count": "counter",
        "wait_seconds_sum": "counter",
    }  # fmt: skip


def test_metrics_come_back_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    FakeFamily.made.clear()
    asked = threading.Semaphore(0)
    texts = ["depth 1.0\n", "depth {", "depth {", "depth 2.0\n"]

    def read() -> str:
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        asked.release()
        return text

    mirror = MetricsMirror(read, type("Utils", (), {"MetricFamily": FakeFamily}), interval_s=0.001)
    # The fifth begins when the fourth is done.
    for _ in range(5):
        assert asked.acquire(timeout=30)
    mirror.close()
    assert FakeFamily.made["depth"].metrics["{}"].number == 2.0
    assert [record.getMessage() for record in caplog.records] == ["the metrics cannot be copied"]


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that answers every request with what the test gave it."""

    content: ClassVar[bytes] = b""
    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def answering() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_the_client_reads_a_stream(answering: str) -> None:
    done = DoneEvent(tokens=(4, 5), text="ab", tail="b", finish_reason="length", report={})
    responses = [
        {"final": False, "tokens": 4, "text": "a", "report": ""},
        {"final": False, "tokens": [5], "text": "", "report": ""},
        {"final": True, "tokens": [], "text": "b", "report": json.dumps(done.to_json())},
    ]
    Answers.content = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in responses)
    found = list(TritonClient(answering).events({}))
    assert found == [TokenEvent(index=0, token=4, text="a"), TokenEvent(index=1, token=5, text=""), done]


@pytest.mark.parametrize(
    ("content", "fault", "message"),
    [
        (b'data: {"error":"queue_full: come later"}\n\n', ServingFault.QUEUE_FULL, "come later"),
        (b'data: {"error":"Stub process is not healthy."}\n\n', ServingFault.INTERNAL, "Stub"),
        (b"<html>busy</html>", ServingFault.INTERNAL, "no JSON"),
        (b"[]", ServingFault.INTERNAL, "sent"),
        (b"", ServingFault.INTERNAL, "without its last response"),
    ],
)
def test_the_client_tells_faults(answering: str, content: bytes, fault: ServingFault, message: str) -> None:
    Answers.content = content
    with pytest.raises(ServingError, match=message) as caught:
        list(TritonClient(answering).events({}))
    assert caught.value.fault is fault


def test_an_error_message_is_taken_apart() -> None:
    assert failure_of("deadline: too late: really").fault is ServingFault.DEADLINE
    assert str(failure_of("deadline: too late: really")) == "too late: really"
    assert failure_of("nonsense: x").fault is ServingFault.INTERNAL


def test_wrong_addresses_are_told() -> None:
    for url in (
        "https://host:1", "http://", "ftp://host", "http://host:1/path", "http://host:99999", "http://host:x",
        "http://[::1", "http://host:-1", "http://a b", "http://" + "x" * 64, "http://\udcff",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="http://host:port"):
            TritonClient(url)
    with pytest.raises(LaunchError, match="does not answer"):
        TritonClient("127.0.0.1:1", timeout_s=5).ready()


def test_a_probe_fails_where_nobody_or_no_model_answers(answering: str) -> None:
    Answers.content = b'{"error":"rank_failed: rank 1 is gone"}'
    result = CliRunner().invoke(probe, ["--url", answering], standalone_mode=False)
    assert isinstance(result.exception, ServingError)
    assert "rank 1 is gone" in str(result.exception)
    missing = CliRunner().invoke(probe, ["--url", "http://127.0.0.1:1"], standalone_mode=False)
    assert isinstance(missing.exception, LaunchError)


def test_a_command_that_must_not_outlive_its_parent(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "trt_redknot.serving.parent", "/bin/sh", "-c",
                          "echo $$ > {mark}; while :; do sleep 0.05; done"])
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text(encoding="ascii").strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(mark.read_text(encoding="ascii"))
    parent.kill()
    parent.wait(30)
    wait_until_gone({child: "child"}, 30)
    wrong = subprocess.run(
        [sys.executable, "-m", "trt_redknot.serving.parent"], capture_output=True, text=True, timeout=60, check=False,
        cwd=ROOT,
    )  # fmt: skip
    assert (wrong.returncode, "a command is missing" in wrong.stderr) == (2, True)


def test_the_model_is_nothing_but_a_codec() -> None:
    text = (MODEL / "1" / "model.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 50
    assert "trt_redknot.serving.triton import TritonFrontEnd" in text


def test_a_port_in_use_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http, metrics = free_ports(2)
        with pytest.raises(LaunchError, match=rf"127.0.0.1:{port} to be free for grpc.*--grpc-port"):
            Endpoints(host="127.0.0.1", http=http, grpc=port, metrics=metrics).check()
    with pytest.raises(LaunchError, match=rf"127.0.0.1:{http} to be free for metrics.*--metrics-port"):
        Endpoints(host="127.0.0.1", http=http, grpc=port, metrics=http).check()
    Endpoints(host="127.0.0.1", http=http, grpc=port, metrics=metrics).check()
