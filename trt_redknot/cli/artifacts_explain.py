"""`artifacts explain`: why a request would or would not reuse each of its documents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from trt_redknot.artifacts.identity import ArtifactIdentity
from trt_redknot.cli.documents import find_documents, read_document
from trt_redknot.cli.engine_options import ENGINE_OPTION
from trt_redknot.cli.output import Output
from trt_redknot.cli.store_options import JSON_OPTION, NAMESPACE_OPTION, STORE_OPTION
from trt_redknot.request.file import read_request
from trt_redknot.request.request import Artifact

if TYPE_CHECKING:
    from trt_redknot.admission.explain import DocumentFinding, Explanation
    from trt_redknot.artifacts.store import ArtifactStore

_REFUSED = 1


@click.command(
    name="explain",
    epilog="""\b
Examples:
  python -m trt_redknot artifacts explain --engine engine --store store --request question.json
  python -m trt_redknot artifacts explain --engine engine --store store documents/manual.txt

Runs on one process and speaks for all ranks, as far as they see this store. Leaves with status 1 where a document
would be recomputed. Nothing is changed: no quarantine, no time of use.
""",
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--request", "request_file", type=click.Path(path_type=Path), help="Request file (docs/requests.md).")
@ENGINE_OPTION
@STORE_OPTION
@NAMESPACE_OPTION
@JSON_OPTION
def explain_command(
    paths: tuple[Path, ...], request_file: Path | None, engine_dir: Path, store: Path, namespace: str, as_json: bool
) -> None:
    """Say for each document, and each rank, whether it would be reused, and if not, why not."""
    from trt_redknot.admission.explain import explain, looking_store
    from trt_redknot.engine.manifest import read_manifest

    if (request_file is None) == (not paths):
        raise click.UsageError("Name either --request or documents.")
    manifest, geometry = read_manifest(engine_dir)
    identity = manifest.artifact_identity(geometry)
    found = looking_store(store, namespace)
    names, documents, note = _asked(paths, request_file, engine_dir, found, identity)
    out = Output()
    with out.progress("looking at documents", len(documents) * manifest.tp_size) as advance:
        told = explain(
            documents, found, identity=identity, geometry=geometry, profile=manifest.profile,
            tp_size=manifest.tp_size, advance=advance,
        )  # fmt: skip
    if as_json:
        out.json(_as_json(told, names, note))
    else:
        out.show(_table(told, names, manifest.tp_size))
        out.show(escape(_conclusion(told, note)))
    if not told.admitted:
        click.get_current_context().exit(_REFUSED)


def _asked(
    paths: tuple[Path, ...], request_file: Path | None, engine_dir: Path, store: ArtifactStore,
    identity: ArtifactIdentity,
) -> tuple[list[str], list[Artifact], str | None]:  # fmt: skip
    """Names for people, documents, and a note where the request itself asks for no reuse."""
    from trt_redknot.engine.tokenizer import EngineTokenizer

    if request_file is not None:
        # Fresh text is not looked at, so it needs no tokenizer.
        request = read_request(request_file, lambda: lambda text: [len(text)])
        documents = [part for part in request.segments if isinstance(part, Artifact)]
        note = "the request asks for recomputation (reuse: null)" if request.reuse is None else None
        places = [index for index, part in enumerate(request.segments) if isinstance(part, Artifact)]
        return [f"segment {index}" for index in places], documents, note
    files = find_documents(paths)
    tokenizer = EngineTokenizer(engine_dir) if any(path.suffix != ".json" for path in files) else None
    read = [read_document(path, tokenizer.encode if tokenizer else _no_text) for path in files]
    made = [Artifact(store.artifact_id(each.tokens, identity), tokens=each.tokens) for each in read]
    return [str(each.path) for each in read], made, None


def _no_text(text: str) -> list[int]:
    raise AssertionError(f"{len(text)} characters of text without a tokenizer")


def _table(told: Explanation, names: list[str], ranks: int) -> Table:
    table = Table(title=f"{len(names)} documents, {ranks} ranks")
    for column in ("document", "artifact", "gen", "tokens", "ranks", "outcome", "why"):
        table.add_column(column, overflow="fold")
    for document, name in zip(told.documents, names, strict=True):
        for number, (group, outcome, why) in enumerate(_outcomes(document)):
            head = (name, document.artifact_id, _generations(document), str(document.tokens or "?"))
            shown = head if number == 0 else ("", "", "", "")
            table.add_row(*map(escape, (*shown, group, outcome, why)))
    return table


def _outcomes(document: DocumentFinding) -> list[tuple[str, str, str]]:
    """Ranks that see the same, together: (ranks, outcome, why)."""
    if document.error is not None:
        return [("all", "wrong request", document.error)]
    groups: dict[tuple[str, str], list[int]] = {}
    for each in document.ranks:
        outcome = "reused" if each.reason is None else each.reason.value
        groups.setdefault((outcome, each.detail or ""), []).append(each.rank)
    every = len(document.ranks)
    rows = [
        ("all" if len(ranks) == every else ", ".join(map(str, ranks)), outcome, why)
        for (outcome, why), ranks in groups.items()
    ]
    return [*rows, *(("", "hint", hint) for hint in document.hints)]


def _generations(document: DocumentFinding) -> str:
    numbers = sorted({each.generation for each in document.ranks if each.generation is not None})
    return ", ".join(map(str, numbers)) or "-"


def _conclusion(told: Explanation, note: str | None) -> str:
    if note is not None:
        return note
    wrong = next((document for document in told.documents if document.error is not None), None)
    if wrong is not None:
        return f"The request would be refused: {wrong.error}"
    if told.reason is not None:
        return f"All ranks would recompute: {told.reason}: {told.detail}"
    return "All ranks would reuse all documents." if told.documents else "The request names no artifact."


def _as_json(told: Explanation, names: list[str], note: str | None) -> dict[str, object]:
    documents = [
        {"document": name, "fits": document.fits, **asdict(document)}
        for document, name in zip(told.documents, names, strict=True)
    ]
    return {
        "admitted": told.admitted and note is None,
        "reason": told.reason,
        "detail": told.detail,
        "conclusion": _conclusion(told, note),
        "documents": documents,
    }
