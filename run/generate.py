"""Answers one request, on as many ranks as the engine was built for. `python run/generate.py --help` explains."""

from trt_redknot.cli.command import run_command
from trt_redknot.cli.generate import generate_command
from trt_redknot.launch import world_communicator

if __name__ == "__main__":
    world = world_communicator()
    command = generate_command(world)
    run_command(lambda: command.main(standalone_mode=False), world)
