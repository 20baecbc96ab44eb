"""Finds which heads need the context. `python run/profile_heads.py --help` explains."""

from trt_redknot.cli.command import run_command
from trt_redknot.cli.profile_heads import profile_heads_command
from trt_redknot.launch import world_communicator

if __name__ == "__main__":
    world = world_communicator()
    command = profile_heads_command(world)
    run_command(lambda: command.main(standalone_mode=False), world)
