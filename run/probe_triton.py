"""Asks a Triton server a real question; leaves with 0 if it answers. `python run/probe_triton.py --help` explains."""

from trt_redknot.cli.command import run_command
from trt_redknot.serving.triton_probe import probe

if __name__ == "__main__":
    run_command(lambda: probe.main(standalone_mode=False))
