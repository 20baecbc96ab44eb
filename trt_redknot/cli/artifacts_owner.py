"""`artifacts quota` and `artifacts adopt`: what binds a store as a whole."""

from __future__ import annotations

from pathlib import Path

import click

from trt_redknot.cli.output import Output
from trt_redknot.cli.store_options import JSON_OPTION, NAMESPACE_OPTION, STORE_OPTION
from trt_redknot.errors import StoreError


@click.command()
@click.argument("size", required=False, metavar="[BYTES|none]")
@STORE_OPTION
@NAMESPACE_OPTION
@JSON_OPTION
def quota(size: str | None, store: Path, namespace: str, as_json: bool) -> None:
    """Show the quota of a namespace, set it to BYTES, or remove it with "none".

    It binds every process that builds in this namespace. Setting it evicts nothing; the next build that needs room
    does.
    """
    from trt_redknot.artifacts.store import ArtifactStore

    found = ArtifactStore(store, namespace=namespace)
    if size is not None:
        found.set_quota(_bytes(size))
    limit = found.stat().capacity_bytes
    if as_json:
        Output().json({"namespace": namespace, "capacity_bytes": limit})
    else:
        Output().show(f"namespace {namespace}: {'no quota' if limit is None else f'{limit} bytes'}")


@click.command()
@STORE_OPTION
def adopt(store: Path) -> None:
    """Take over a store whose file system does not carry locks between hosts.

    Only when no process of the host that used it before, or of a boot before this one, uses it any more.
    """
    from trt_redknot.artifacts.store import ArtifactStore

    found = ArtifactStore(store)
    if not found.root.is_dir():
        raise StoreError("there is no artifact store", path=found.root, remedy="Name the folder of a store.")
    found.adopt()
    Output().show(f"{found.root} belongs to this host now")


def _bytes(size: str) -> int | None:
    if size == "none":
        return None
    if not size.isdecimal() or int(size) < 1:
        raise StoreError("the quota is not a number of bytes", expected='bytes > 0, or "none"', found=size)
    return int(size)
