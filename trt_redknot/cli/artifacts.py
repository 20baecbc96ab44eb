"""`artifacts build|ls|inspect|verify|gc|rm|pin|unpin|stat|explain|quota|adopt`: what people do to a store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from trt_redknot.artifacts.records import Listed, Verdict
from trt_redknot.cli.artifacts_build import build
from trt_redknot.cli.artifacts_explain import explain_command
from trt_redknot.cli.artifacts_owner import adopt, quota
from trt_redknot.cli.output import Output
from trt_redknot.cli.store_options import store_options
from trt_redknot.launch import world_communicator
from trt_redknot.observability.logs import json_log

if TYPE_CHECKING:
    from trt_redknot.artifacts.store import ArtifactStore

_UNSOUND = 1
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@click.group()
@click.option(
    "--log", "log_file", type=click.Path(), help="Append what happens to this file as JSON lines; - is standard error."
)
@click.option("--verbose", is_flag=True, help="Log every lookup as well.")
@click.pass_context
def artifacts(context: click.Context, log_file: str | None, verbose: bool) -> None:
    """Build the artifacts of a store and look after them."""
    if log_file is not None:
        world = world_communicator()
        rank = 0 if world is None else world.Get_rank()
        context.with_resource(json_log(log_file, rank=rank, level=logging.DEBUG if verbose else logging.INFO))


artifacts.add_command(build)
artifacts.add_command(explain_command)
artifacts.add_command(quota)
artifacts.add_command(adopt)


_ID = click.argument("artifact_id", metavar="ARTIFACT_ID")


@artifacts.command()
@store_options
def ls(store: ArtifactStore, as_json: bool) -> None:
    """List the published artifacts: size, tokens, format, ranks, last use."""
    listed = store.ls()
    if as_json:
        Output().json([_described(found) for found in listed])
        return
    table = Table(title=f"{len(listed)} generations in {store.root}, namespace {store.namespace}")
    for column in ("artifact", "gen", "tokens", "format", "TP", "size", "last used", "state"):
        table.add_column(column, justify="right" if column in ("gen", "tokens", "TP", "size") else "left", no_wrap=True)
    for found in listed:
        certificate, published = found.certificate, found.published
        known = (
            ("?", "?", "?")
            if certificate is None
            else (str(certificate.token_count), certificate.artifact_format.value, str(certificate.tp_size))
        )
        size, used = human_bytes(published.bytes), _time(published.last_used)
        table.add_row(published.artifact_id, str(published.generation), *known, size, used, _state(found))
    Output().show(table)


@artifacts.command()
@_ID
@store_options
def inspect(store: ArtifactStore, as_json: bool, artifact_id: str) -> None:
    """Show an artifact's certificate: what it is, whom it fits, its files."""
    listed = store.inspect(artifact_id)
    if as_json:
        Output().json([{**_described(found), "certificate": _certificate(found)} for found in listed])
        return
    for found in listed:
        table = Table("field", "value", title=f"{artifact_id}, generation {found.published.generation}")
        table.add_row("state", _state(found))
        table.add_row("last used", _time(found.published.last_used))
        for name, value in _certificate(found).items():
            table.add_row(name, _brief(value))
        if found.fault is not None:
            table.add_row("fault", found.fault)
        Output().show(table)


@artifacts.command()
@click.argument("artifact_id", metavar="[ARTIFACT_ID]", required=False)
@click.option("--keep", is_flag=True, help="Only report; leave corrupt artifacts where they are.")
@store_options
def verify(store: ArtifactStore, as_json: bool, artifact_id: str | None, keep: bool) -> None:
    """Read every file and compare it with its certificate; corrupt artifacts go to quarantine.

    Leaves with status 1 where something is corrupt.
    """
    verdicts = store.verify(artifact_id, quarantine=not keep)
    if as_json:
        Output().json([_verdict(verdict) for verdict in verdicts])
    else:
        table = Table("artifact", "gen", "size", "verdict", title=f"{len(verdicts)} generations read")
        for verdict in verdicts:
            aside = f"\nmoved to {verdict.quarantined}" if verdict.quarantined else ""
            outcome = "sound" if verdict.sound else "\n".join(verdict.faults) + aside
            table.add_row(verdict.artifact_id, str(verdict.generation), human_bytes(verdict.bytes), outcome)
        Output().show(table)
    if not all(verdict.sound for verdict in verdicts):
        click.get_current_context().exit(_UNSOUND)


@artifacts.command()
@click.option("--quarantine", is_flag=True, help="Also delete what was moved to quarantine.")
@store_options
def gc(store: ArtifactStore, as_json: bool, quarantine: bool) -> None:
    """Delete what nobody needs: dead builds, leftovers of removals, superseded generations.

    What is leased, pinned or being built stays.
    """
    collected = store.gc(quarantine=quarantine)
    if as_json:
        Output().json(asdict(collected))
        return
    table = Table("removed", "count", "size", title=f"{store.root}, namespace {store.namespace}")
    table.add_row("orphans", str(collected.orphans.folders), human_bytes(collected.orphans.bytes))
    table.add_row("superseded generations", str(collected.superseded), human_bytes(collected.superseded_bytes))
    table.add_row("quarantined generations", str(collected.quarantined), human_bytes(collected.quarantined_bytes))
    Output().show(table)


@artifacts.command()
@click.argument("artifact_ids", metavar="ARTIFACT_ID...", nargs=-1, required=True)
@click.option("--generation", type=click.IntRange(min=1), help="Only this generation.")
@store_options
def rm(store: ArtifactStore, as_json: bool, artifact_ids: Sequence[str], generation: int | None) -> None:
    """Remove artifacts that are neither pinned nor in use."""
    removed = [found for artifact_id in artifact_ids for found in store.rm(artifact_id, generation=generation)]
    if as_json:
        keys = ("artifact_id", "generation", "bytes")
        Output().json([{key: getattr(found, key) for key in keys} for found in removed])
        return
    for found in removed:
        Output().show(f"removed {found.artifact_id} generation {found.generation}, {human_bytes(found.bytes)}")


@artifacts.command()
@_ID
@store_options
def pin(store: ArtifactStore, as_json: bool, artifact_id: str) -> None:
    """Keep an artifact from eviction, gc and rm."""
    store.pin(artifact_id)
    _confirm(artifact_id, True, as_json)


@artifacts.command()
@_ID
@store_options
def unpin(store: ArtifactStore, as_json: bool, artifact_id: str) -> None:
    """Undo pin."""
    store.unpin(artifact_id)
    _confirm(artifact_id, False, as_json)


@artifacts.command()
@store_options
def stat(store: ArtifactStore, as_json: bool) -> None:
    """Show the totals of a namespace and the room on its disk."""
    status = store.stat()
    if as_json:
        Output().json({**asdict(status), "root": str(status.root)})
        return
    table = Table("", "", title=f"{status.root}, namespace {status.namespace}", show_header=False)
    for name in ("artifacts", "generations", "quarantined"):
        table.add_row(name, str(getattr(status, name)))
    quota = "none" if status.capacity_bytes is None else human_bytes(status.capacity_bytes)
    table.add_row("quota", quota)
    for name in ("bytes", "pinned_bytes", "reserved_bytes", "disk_free_bytes"):
        value = getattr(status, name)
        table.add_row(name.replace("_", " "), "?" if value is None else human_bytes(value))
    Output().show(table)


def human_bytes(count: int) -> str:
    """A byte count for people, in binary units."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def _confirm(artifact_id: str, pinned: bool, as_json: bool) -> None:
    if as_json:
        Output().json({"artifact_id": artifact_id, "pinned": pinned})
    else:
        Output().show(f"{'pinned' if pinned else 'unpinned'} {artifact_id}")


def _described(found: Listed) -> dict[str, object]:
    published, certificate = found.published, found.certificate
    return {
        "artifact_id": published.artifact_id,
        "generation": published.generation,
        "bytes": published.bytes,
        "last_used": _time(published.last_used),
        "pinned": published.pinned,
        "leased": found.leased,
        "superseded": published.superseded,
        "tokens": None if certificate is None else certificate.token_count,
        "format": None if certificate is None else certificate.artifact_format.value,
        "tp_size": None if certificate is None else certificate.tp_size,
        "fault": found.fault,
    }


def _certificate(found: Listed) -> dict[str, Any]:
    return {} if found.certificate is None else found.certificate.model_dump(mode="json")


def _verdict(verdict: Verdict) -> dict[str, object]:
    aside = None if verdict.quarantined is None else str(verdict.quarantined)
    return {**asdict(verdict), "sound": verdict.sound, "quarantined": aside}


def _state(found: Listed) -> str:
    marks = {
        "corrupt": found.fault is not None,
        "pinned": found.published.pinned,
        "in use": found.leased,
        "superseded": found.published.superseded,
    }
    return ", ".join(mark for mark, holds in marks.items() if holds) or "ready"


def _brief(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "\n".join(" ".join(f"{item}" for item in entry.values()) for entry in value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
