"""Options of the commands that open an engine."""

from __future__ import annotations

from pathlib import Path

import click

ENGINE_OPTION = click.option(
    "--engine", "engine_dir", type=click.Path(path_type=Path), required=True, help="Engine folder."
)
DEVICE_OPTION = click.option(
    "--device", show_default="cpu; cuda for an engine of the tensorrt backend",
    help="Where each rank computes: cpu, cuda (the GPU of the rank's number on its host), or cuda:N.",
)  # fmt: skip
