"""Measures what reuse costs in answers. `python run/evaluate.py --help` explains."""

from trt_redknot.cli.command import run_command
from trt_redknot.cli.evaluate import evaluate_command
from trt_redknot.launch import world_communicator

if __name__ == "__main__":
    world = world_communicator()
    command = evaluate_command(world)
    run_command(lambda: command.main(standalone_mode=False), world)
