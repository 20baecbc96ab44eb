"""The command behind `run/probe_triton.py`: a health check that sends a real request."""

from __future__ import annotations

import time

import click

from trt_redknot.cli.numbers import FiniteRange
from trt_redknot.errors import LaunchError
from trt_redknot.serving.triton_client import TritonClient


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Triton's HTTP address.")
@click.option("--timeout-s", type=FiniteRange(0.1, 86400), default=30.0, show_default=True, help="For the whole probe.")
@click.option("--light", is_flag=True, help="Ask the service for its state only; its engine computes nothing.")
def probe(url: str, timeout_s: float, light: bool) -> None:
    """Check that a Triton server answers requests: Triton's readiness, the service's state, one generated token.

    Readiness alone proves little: Triton goes on to report it after the model's process has died.
    """
    client = TritonClient(url, timeout_s=timeout_s)
    started = time.perf_counter()
    if not client.ready():
        raise LaunchError("Triton does not report the model as ready", path=url)
    state = client.whole({"action": "health"})
    told = f"{state['world_size']} ranks, {state['running']} running, {state['waiting']} waiting"
    if not light:
        left = timeout_s - (time.perf_counter() - started)
        if left <= 0:
            raise LaunchError("the probe ran out of time", expected=f"less than {timeout_s:g} s", path=url)
        client.whole(
            {"segments": [{"tokens": [0]}], "max_new_tokens": 1, "reuse": None, "deadline_s": left, "stop_tokens": []}
        )
    print(f"healthy: {told}, {time.perf_counter() - started:.3f} s")
