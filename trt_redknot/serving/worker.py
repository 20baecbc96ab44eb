"""What ranks other than 0 run: whatever rank 0 says, until it says stop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from trt_redknot.observability.logs import json_log
from trt_redknot.serving.commands import Stop, decode_commands
from trt_redknot.serving.conductor import encode_status
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.link import link_over
from trt_redknot.serving.runner import RankRunner
from trt_redknot.serving.service import open_engine
from trt_redknot.serving.stores import Stores

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@torch.inference_mode()
def run_worker(config: ServingConfig, comm: Intracomm | None) -> None:
    """Open this rank's part of the engine and follow rank 0. Returns when rank 0 closes the service. Collective.

    While rank 0 has nothing to do the rank sleeps and looks every few milliseconds. What is raised must end the job
    (``python -m mpi4py`` does that): the other ranks wait for this one.

    Raises:
        EngineError, ConfigError: as :meth:`Service.open`; on all ranks.
    """
    engine = open_engine(config, comm)
    link = link_over(comm)
    with contextlib.ExitStack() as logs:
        if config.log is not None:
            logs.enter_context(json_log(config.log, rank=link.rank))
        runner = RankRunner(engine, config, Stores(config=config))
        while True:
            commands = decode_commands(link.follow(encode_status(runner.preloader.finished())))
            for command in commands:
                runner.run(command)
            if commands and isinstance(commands[-1], Stop):
                return
