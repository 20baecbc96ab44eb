"""Options that the commands of `artifacts` share, and the store that they describe."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_redknot.observability.events import AllEvents, StoreEvents
from trt_redknot.observability.logs import StoreLog

if TYPE_CHECKING:
    from trt_redknot.artifacts.store import ArtifactStore

STORE_OPTION = click.option(
    "--store", type=click.Path(path_type=Path), required=True, help="Folder of the artifact store."
)
NAMESPACE_OPTION = click.option("--namespace", default="default", show_default=True, help="Tenant of the store.")
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
METRICS_OPTION = click.option(
    "--metrics", "metrics_file", type=click.Path(path_type=Path),
    help="Write what the command counted, and the namespace's totals, to this file as Prometheus text.",
)  # fmt: skip


@contextlib.contextmanager
def watched_store(
    root: Path, namespace: str, metrics_file: Path | None, *, capacity: int | None = None, rank: int = 0
) -> Iterator[ArtifactStore]:
    """A store whose metrics are written to `metrics_file` by rank 0 at the end, however that comes."""
    from trt_redknot.artifacts.store import ArtifactStore
    from trt_redknot.observability.metrics import StoreMetrics

    log = StoreLog(namespace)
    metrics = StoreMetrics() if metrics_file is not None else None
    events: StoreEvents = log if metrics is None else AllEvents(log, metrics)
    store = ArtifactStore(root, capacity_bytes=capacity, namespace=namespace, events=events)
    try:
        yield store
    finally:
        if metrics is not None and metrics_file is not None and rank == 0:
            metrics.watch(store)
            metrics.write(metrics_file)


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of commands that need a store with something in it; hands them an :class:`ArtifactStore`, `store`."""

    @functools.wraps(command)
    def opened(store: Path, namespace: str, metrics_file: Path | None, **others: Any) -> None:
        from trt_redknot.artifacts.store import ArtifactStore

        ArtifactStore(store, namespace=namespace).require()
        with watched_store(store, namespace, metrics_file) as found:
            command(store=found, **others)

    decorated: Callable[..., None] = opened
    for option in (METRICS_OPTION, JSON_OPTION, NAMESPACE_OPTION, STORE_OPTION):
        decorated = option(decorated)
    return decorated
