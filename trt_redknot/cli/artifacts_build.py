"""`artifacts build`: documents become artifacts, on one rank or under mpirun on all of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from trt_redknot.artifacts.identity import TpGeometry
from trt_redknot.cli.documents import DocumentFile, find_documents, read_document
from trt_redknot.cli.engine_options import DEVICE_OPTION, ENGINE_OPTION
from trt_redknot.cli.output import Output
from trt_redknot.cli.store_options import METRICS_OPTION, watched_store
from trt_redknot.errors import RequestError
from trt_redknot.launch import world_communicator
from trt_redknot.textfile import replace_text

if TYPE_CHECKING:
    from trt_redknot.artifacts.store import ArtifactStore
    from trt_redknot.engine.engine import Engine


@click.command(
    epilog="""\b
Examples:
  python -m trt_redknot artifacts build --engine engine --store store documents/
  mpirun -n 2 python -m mpi4py -m trt_redknot artifacts build --engine engine --store store manual.txt ids.json
Text files (.txt, .md) are encoded with the engine's tokenizer; a .json file is a list of token ids. What is in the
store already is skipped, so an interrupted run is continued by running it again.
"""
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@ENGINE_OPTION
@DEVICE_OPTION
@click.option("--store", "store_dir", type=click.Path(path_type=Path), required=True, help="Folder of the store.")
@click.option("--namespace", default="default", show_default=True, help="Tenant of the store.")
@click.option("--capacity", type=click.IntRange(1), help="Quota of the namespace in bytes. Left out: the disk's.")
@click.option("--rebuild", is_flag=True, help="Make a new generation even where the artifact exists.")
@click.option("--list", "list_file", type=click.Path(path_type=Path), help="Write {file name: artifact id} here.")
@METRICS_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
def build(
    paths: tuple[Path, ...], engine_dir: Path, device: str | None, store_dir: Path, namespace: str,
    capacity: int | None, rebuild: bool, list_file: Path | None, metrics_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compute documents once and keep what their layers produced."""
    from trt_redknot.engine.engine import Engine
    from trt_redknot.engine.tokenizer import EngineTokenizer

    engine = Engine.open(engine_dir, world_communicator(), device=device)
    out = Output(engine.collectives.rank)
    files = find_documents(paths)
    if list_file is not None:
        _check_names(files)
    tokenizer = EngineTokenizer(engine_dir) if any(path.suffix != ".json" for path in files) else None
    documents = [read_document(path, tokenizer.encode if tokenizer else _no_text) for path in files]
    # All of them before the first is built: a long run does not end at a document that could never do.
    for document in documents:
        engine.check_document(document.tokens, str(document.path))
    with watched_store(store_dir, namespace, metrics_file, capacity=capacity, rank=engine.collectives.rank) as store:
        rows = _build_all(engine, store, documents, rebuild, out)
    if list_file is not None and engine.collectives.rank == 0:
        _write_list(list_file, {Path(str(row["document"])).name: row["artifact_id"] for row in rows})
    if as_json:
        out.json(rows)
        return
    table = Table(title=f"{len(rows)} documents in {store_dir}, namespace {namespace}")
    for column in ("document", "artifact_id", "tokens", "state", "seconds"):
        table.add_column(column.replace("_", " "), justify="right" if column in ("tokens", "seconds") else "left")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    out.show(table)


def _build_all(
    engine: Engine, store: ArtifactStore, documents: list[DocumentFile], rebuild: bool, out: Output
) -> list[dict[str, object]]:
    """One row a document. What was published stays whatever becomes of the later ones."""
    tp = TpGeometry.even(engine.geometry, engine.collectives.size)
    rows: list[dict[str, object]] = []
    with out.progress("building artifacts", sum(len(document.tokens) for document in documents)) as advance:
        for document in documents:
            known = store.find(store.artifact_id(document.tokens, engine.identity), identity=engine.identity, tp=tp)
            started = time.perf_counter()
            artifact_id = engine.build_artifact(store, document.tokens, rebuild=rebuild)
            rows.append(
                {
                    "document": str(document.path),
                    "artifact_id": artifact_id,
                    "tokens": len(document.tokens),
                    "state": "found" if known is not None and not rebuild else "built",
                    "seconds": round(time.perf_counter() - started, 3),
                }
            )
            advance(len(document.tokens))
    return rows


def _no_text(text: str) -> list[int]:
    raise AssertionError(f"{len(text)} characters of text without a tokenizer")


def _check_names(files: list[Path]) -> None:
    """Raises RequestError where the list would have one id for two files."""
    first: dict[str, Path] = {}
    for path in files:
        if first.setdefault(path.name, path).absolute() != path.absolute():
            raise RequestError(
                "the list cannot tell two documents apart", expected="file names that differ",
                found=f"{first[path.name]} and {path}", remedy="Rename one, or build them in two calls.",
            )  # fmt: skip


def _write_list(path: Path, ids: dict[str, object]) -> None:
    try:
        replace_text(path, json.dumps(ids, indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"the list cannot be written: {error.strerror or error}", path=path) from error
