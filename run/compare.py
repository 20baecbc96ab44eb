"""Asks one question in both arms, on as many ranks as the engine was built for. `python run/compare.py --help`
explains."""

from trt_redknot.cli.command import run_command
from trt_redknot.cli.compare import compare_command
from trt_redknot.launch import world_communicator

if __name__ == "__main__":
    world = world_communicator()
    command = compare_command(world)
    run_command(lambda: command.main(standalone_mode=False), world)
