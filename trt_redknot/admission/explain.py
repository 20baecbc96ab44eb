"""Why a request would or would not reuse each of its documents, on every rank, without an engine's weights.

It runs admission's own examination once for each document and rank, so what it says is what admission would do with
this store now. It changes nothing: no quarantine, no time of use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trt_redknot.admission.examine import Examination, Expectation, examine, request_digest
from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.admission.report import Finding, RankReport, conclude
from trt_redknot.admission.tokens import check_documents
from trt_redknot.artifacts.files import Files, real_folders
from trt_redknot.artifacts.folder import ARTIFACT_ID_PATTERN, REASON_FILE
from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_tokens
from trt_redknot.errors import RequestError
from trt_redknot.observability.events import NoEvents
from trt_redknot.request.request import Artifact


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """One rank's view of one document: `reason` is None where it could reuse it."""

    rank: int
    generation: int | None
    reason: FallbackReason | None
    detail: str | None


@dataclass(frozen=True, kw_only=True)
class DocumentFinding:
    """One document. `hints` are what the store knows beyond the reason: what is there instead, and why."""

    index: int
    artifact_id: str
    tokens: int | None
    ranks: tuple[RankFinding, ...]
    hints: tuple[str, ...]
    error: str | None

    @property
    def fits(self) -> bool:
        return self.error is None and all(each.reason is None for each in self.ranks)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The whole request: what admission would conclude, and every document on its own."""

    documents: tuple[DocumentFinding, ...]
    reason: FallbackReason | None
    detail: str | None

    @property
    def admitted(self) -> bool:
        return self.reason is None and all(document.error is None for document in self.documents)


class _LookingFiles(Files):
    """Looking is not using: the order of eviction stays as it is."""

    def touch(self, fd: int, at_ns: int) -> None:
        return None


def looking_store(root: Path | str, namespace: str) -> ArtifactStore:
    """A store for :func:`explain`: it records neither use nor events."""
    return ArtifactStore(root, namespace=namespace, files=_LookingFiles(), events=NoEvents())


def explain(
    documents: Sequence[Artifact],
    store: ArtifactStore,
    *,
    identity: ArtifactIdentity,
    geometry: ModelGeometry,
    profile: SplitProfile,
    tp_size: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Explanation:
    """Look at every document as each of `tp_size` ranks would, all of them with this store.

    Args:
        store: made by :func:`looking_store`.
        advance: told of every document and rank that is done.

    Raises:
        ConfigError: the output groups cannot be split over the ranks.
    """
    tp = TpGeometry.even(geometry, tp_size)
    found = []
    for index, document in enumerate(documents):
        looks = []
        for rank in range(tp_size):
            expected = Expectation(geometry=geometry, profile=profile, identity=identity, tp=tp, rank=rank)
            looks.append(_look(document, store, expected))
            advance(1)
        found.append(_document(index, document, looks, store, identity, geometry.vocab))
    finding = _conclusion(found, documents)
    return Explanation(
        documents=tuple(each for each, _ in found),
        reason=None if finding is None else finding.reason,
        detail=None if finding is None else finding.detail,
    )


def _look(document: Artifact, store: ArtifactStore, expected: Expectation) -> tuple[Examination, RankReport]:
    found = Examination(documents=[document])
    try:
        request = request_digest([document])
        examine([document], store, expected, remaining_s=lambda: float("inf"), found=found)
    except RequestError as error:
        request, found.error = "", error
    try:
        return found, found.report(request)
    finally:
        found.release()


def _document(
    index: int,
    document: Artifact,
    looks: Sequence[tuple[Examination, RankReport]],
    store: ArtifactStore,
    identity: ArtifactIdentity,
    vocab: int,
) -> tuple[DocumentFinding, list[RankReport]]:
    reports = [report for _, report in looks]
    first = looks[0][0]
    ids = first.tokens[0] if first.tokens else None
    error = None if first.error is None else str(first.error)
    if error is None and ids is not None:
        try:
            check_documents([document], [ids], vocab)
        except RequestError as wrong:
            error = str(wrong)
    ranks = tuple(
        RankFinding(
            rank=rank,
            generation=report.generations[0] if report.generations else None,
            reason=report.reason,
            detail=report.detail,
        )
        for rank, report in enumerate(reports)
    )
    missing = any(each.reason is FallbackReason.MISSING_ARTIFACT for each in ranks)
    digest = digest_tokens(ids) if ids is not None else None
    finding = DocumentFinding(
        index=index,
        artifact_id=document.artifact_id,
        tokens=None if ids is None else len(ids),
        ranks=ranks,
        hints=tuple(_hints(document.artifact_id, digest, store, identity)) if missing else (),
        error=error,
    )
    return finding, reports


def _conclusion(
    found: Sequence[tuple[DocumentFinding, list[RankReport]]], documents: Sequence[Artifact]
) -> Finding | None:
    """What `conclude` says of all ranks, asked for each document alone, the first reason in order counting."""
    findings = []
    for index, ((_, reports), document) in enumerate(zip(found, documents, strict=True)):
        complete = all(report.error is None for report in reports)
        here = [replace(each, document=index) if each.document is not None else each for each in reports]
        finding = conclude(here, [document.artifact_id]) if complete else None
        if finding is not None:
            findings.append(finding)
    order = list(FallbackReason)
    return min(findings, key=lambda finding: order.index(finding.reason), default=None)


def _hints(
    artifact_id: str, token_digest: str | None, store: ArtifactStore, identity: ArtifactIdentity
) -> Iterator[str]:
    """Why an artifact may be missing: set aside, in another namespace, or built for another engine."""
    for place in store.quarantined(artifact_id):
        yield f"a generation is in quarantine, {place.name}: {_reason(place)}"
    for folder in real_folders(store.root):
        elsewhere = not folder.name.startswith(".") and folder.name != store.namespace
        if elsewhere and ARTIFACT_ID_PATTERN.fullmatch(artifact_id) and (folder / artifact_id).is_dir():
            yield f"it is in namespace {folder.name}, which is not asked"
    if token_digest is None:
        return
    for listed in store.ls():
        certificate = listed.certificate
        if certificate is not None and certificate.token_digest == token_digest:
            other = [name for name in vars(identity) if getattr(certificate.identity, name) != getattr(identity, name)]
            yield f"artifact {certificate.artifact_id} has the same tokens and another {', '.join(other)}"


def _reason(place: Path) -> str:
    try:
        reason = json.loads((place / REASON_FILE).read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, TypeError, KeyError):
        return "no reason recorded"
    return f"{reason!s:.400}"
