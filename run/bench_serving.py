"""Measures a service under load in both arms. `python run/bench_serving.py --help` explains."""

from trt_redknot.cli.command import run_command
from trt_redknot.serving.bench.command import bench

if __name__ == "__main__":
    run_command(lambda: bench.main(standalone_mode=False))
