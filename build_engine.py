"""Builds an engine from a checkpoint. `python build_engine.py --help` explains."""

from trt_redknot.cli.build_engine import build_engine_command
from trt_redknot.cli.command import run_command
from trt_redknot.launch import world_communicator

if __name__ == "__main__":
    world = world_communicator()
    command = build_engine_command(world)
    run_command(lambda: command.main(standalone_mode=False), world)
