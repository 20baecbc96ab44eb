"""`run/serve_triton.sh`: checks the settings, fills in a model repository, starts Triton, and stays until it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from trt_redknot.cli.command import run_command
from trt_redknot.errors import ConfigError, LaunchError
from trt_redknot.launch import find_mpirun, mpirun_environment, session_folder
from trt_redknot.leftovers import region_prefix, remove_leftovers, remove_regions
from trt_redknot.serving.ending import FrontEnds
from trt_redknot.serving.running import run_until_ended
from trt_redknot.serving.socket import MAX_TEMPORARY_BYTES
from trt_redknot.serving.triton_install import TritonInstall, find_triton
from trt_redknot.serving.triton_repository import MODEL, write_repository

# mpirun ends a broken job with SIGTERM, and after so many seconds with SIGKILL: time for Triton to answer what is open.
_JOB_END_S = 10


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where the server listens."""

    host: str
    http: int
    grpc: int
    metrics: int

    def check(self) -> None:
        """Raise LaunchError for the first port that cannot be listened on, because it is another one's or named twice:
        the server would find it after all ranks have loaded the engine."""
        with contextlib.ExitStack() as held:
            for name in ("http", "grpc", "metrics"):
                port: int = getattr(self, name)
                family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                trial = held.enter_context(socket.socket(family))
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind((self.host, port))
                    trial.listen()
                except OSError as error:
                    raise LaunchError(
                        "a port cannot be listened on", expected=f"{self.host}:{port} to be free for {name}",
                        found=error.strerror or error, remedy=f"Name another one with --{name}-port.",
                    ) from error  # fmt: skip


def server_command(
    install: TritonInstall, repository: Path, endpoints: Endpoints, *, regions: str, exit_timeout_s: int,
    extra: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """tritonserver with every setting that matters here. `regions` begins the names of what it has in shared memory."""
    return [
        str(install.server),
        f"--model-repository={repository}",
        f"--backend-directory={install.backends}",
        f"--backend-config=python,shm-region-prefix-name={regions}",
        f"--http-address={endpoints.host}",
        f"--grpc-address={endpoints.host}",
        f"--metrics-address={endpoints.host}",
        f"--http-port={endpoints.http}",
        f"--grpc-port={endpoints.grpc}",
        f"--metrics-port={endpoints.metrics}",
        # Explicit control is what allows a model to be unloaded and loaded again while the server runs.
        "--model-control-mode=explicit",
        f"--load-model={MODEL}",
        "--disable-auto-complete-config",
        "--strict-readiness=true",
        f"--exit-timeout-secs={exit_timeout_s}",
        *extra,
    ]


def leader_command(server: Sequence[str], install: TritonInstall, world_size: int) -> list[str]:
    """mpirun with the server as rank 0 and a worker for every other rank."""
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    # mpirun's own children would outlive it if it were killed.
    guarded = [sys.executable, "-m", "trt_redknot.serving.parent", *server]
    command = [str(find_mpirun()), *flags, "-n", "1", *guarded]
    if world_size > 1:
        worker = [str(install.interpreter), "-m", "mpi4py", "-m", "trt_redknot.serving", "worker"]
        command += [":", "-n", str(world_size - 1), *worker]
    return command


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError("a setting is ill-formed", expected="NAME=VALUE", found=pair)
        values[name] = value
    return values


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="""\b
Examples:
  run/serve_triton.sh --engine engine --store store
  run/serve_triton.sh --engine engine --store store --mode leader --set max_batch=16 --set missing=build
  run/serve_triton.sh --engine engine --store store --dry-run
The settings, both modes and their limits are in docs/serving.md.
""",
)
@click.option("--engine", type=click.Path(path_type=Path), required=True, help="Engine folder.")
@click.option("--store", type=click.Path(path_type=Path), required=True, help="Artifact store.")
@click.option("--mode", type=click.Choice(["orchestrator", "leader"]), default="orchestrator", show_default=True,
              help="Who starts the ranks: the model, or mpirun around the server.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the service. Repeatable.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--metrics-port", type=click.IntRange(1, 65535), default=8002, show_default=True)
@click.option("--exit-timeout-s", type=click.IntRange(0), default=30, show_default=True,
              help="Seconds open requests get when the server is told to end.")  # fmt: skip
@click.option("--server", type=click.Path(path_type=Path), help="tritonserver; left out: found.")
@click.option("--backends", type=click.Path(path_type=Path), help="Triton's folder of backends; left out: beside it.")
@click.option("--repository", type=click.Path(path_type=Path), help="Keep the filled-in model repository here.")
@click.option("--dry-run", is_flag=True, help="Print the command and the repository, start nothing.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def serve(
    engine: Path, store: Path, mode: str, settings: tuple[str, ...], host: str, http_port: int, grpc_port: int,
    metrics_port: int, exit_timeout_s: int, server: Path | None, backends: Path | None, repository: Path | None,
    dry_run: bool, extra: tuple[str, ...],
) -> int:  # fmt: skip
    """Serve an engine from Triton Inference Server until a signal ends it. EXTRA (after --) goes to tritonserver."""
    from trt_redknot.engine.manifest import read_manifest

    manifest, _ = read_manifest(engine)
    install = find_triton(server, backends)
    named = _settings(settings)
    parameters = {
        "mode": mode, "engine": str(engine.resolve()), "store": str(store.resolve()),
        "world_size": str(manifest.tp_size),
    }  # fmt: skip
    if repeated := sorted(set(named) & set(parameters)):
        raise ConfigError("a setting has an option of its own", found=", ".join(repeated))
    kept = repository is not None and not dry_run
    scratch = Path(tempfile.mkdtemp(prefix="redknot-serve-"))
    folder = repository if repository is not None and kept else scratch / "models"
    try:
        write_repository(folder.resolve(), named | parameters)
        endpoints = Endpoints(host=host, http=http_port, grpc=grpc_port, metrics=metrics_port)
        regions = region_prefix()
        command = server_command(
            install, folder.resolve(), endpoints, regions=regions, exit_timeout_s=exit_timeout_s, extra=extra
        )
        if mode == "leader":
            command = leader_command(command, install, manifest.tp_size)
        if not dry_run:
            endpoints.check()
        if dry_run:
            print(shlex.join(command))
            print((folder / MODEL / "config.pbtxt").read_text(encoding="utf-8"), end="")
            return 0
        environment = install.environment(mpirun_environment(os.environ))
        if len(os.fsencode(scratch)) <= MAX_TEMPORARY_BYTES:
            # What a process of the server leaves that is killed before it can tidy up, as one that loads an engine is.
            environment["TMPDIR"] = str(scratch)
        if mode == "leader":
            environment |= session_folder(scratch)
        environment["PRTE_MCA_odls_base_sigkill_timeout"] = str(_JOB_END_S)
        remove_leftovers()
        front_ends = FrontEnds()
        try:
            return run_until_ended(command, environment | front_ends.environment, install.server, front_ends)
        finally:
            front_ends.close()
            remove_regions(regions)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    run_command(lambda: serve.main(prog_name="run/serve_triton.sh", standalone_mode=False))
