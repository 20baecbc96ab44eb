"""`python -m mpi4py -m trt_redknot.serving`: the ranks of a service. Front ends and mpirun start it, not people."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from trt_redknot.cli.command import run_command
from trt_redknot.errors import LaunchError
from trt_redknot.launch import world_communicator
from trt_redknot.serving.leader import follow_leader
from trt_redknot.serving.rank import serve_rank


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def ranks() -> None:
    """Ranks of a service. docs/serving.md explains the two modes."""


@ranks.command()
@click.option("--socket", "socket_path", type=click.Path(path_type=Path), required=True, help="Of the front end.")
def rank(socket_path: Path) -> None:
    """A rank of a service that a front end has started (orchestrator mode)."""
    serve_rank(socket_path, world_communicator())


@ranks.command()
def worker() -> None:
    """A rank beside a Triton server that is rank 0 (leader mode)."""
    comm = world_communicator()
    if comm is None or comm.Get_rank() == 0:
        raise LaunchError(
            "a worker is a rank other than 0 of an MPI job", remedy="Start the job with run/serve_triton.sh."
        )
    # mpirun passes SIGTERM to every rank. Rank 0 then finishes what is open, for which it needs the others.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow_leader(comm)


if __name__ == "__main__":
    # A worker's rank 0 is another program, with which it cannot agree on how the command ended.
    alone = sys.argv[1:2] == ["worker"]
    run_command(lambda: ranks.main(standalone_mode=False), None if alone else world_communicator())
