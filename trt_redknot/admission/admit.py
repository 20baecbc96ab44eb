"""Admission: all ranks reuse, or all ranks recompute with the same reason (docs/policy.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from trt_redknot.admission.examine import Examination, Expectation, examine, request_digest
from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.admission.report import Finding, RankReport, check_comparable, conclude
from trt_redknot.admission.tokens import check_documents, complete_tokens
from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry
from trt_redknot.artifacts.lease import Lease
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.collectives.base import Collectives
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.errors import RequestError, StoreError
from trt_redknot.request.request import Artifact

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdmittedDocument:
    """One document of the request: its token ids as the artifact has them (int64 [n], edits not applied), its lease.

    `lease` is None where the request recomputes.
    """

    artifact_id: str
    tokens: NDArray[np.int64]
    lease: Lease | None


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The same on every rank, but for the leases, which are each rank's own. A context manager that lets them go.

    Attributes:
        reason, detail: why the request recomputes, the same for people; None where it reuses.
        refused: index in `documents` of the one that `reason` is about; None where it is about none in particular.
    """

    documents: tuple[AdmittedDocument, ...]
    reason: FallbackReason | None
    detail: str | None
    refused: int | None

    @property
    def admitted(self) -> bool:
        return self.reason is None

    def close(self) -> None:
        for document in self.documents:
            if document.lease is not None:
                document.lease.close()

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def admit(
    documents: Sequence[Artifact],
    store: ArtifactStore,
    *,
    identity: ArtifactIdentity,
    geometry: ModelGeometry,
    profile: SplitProfile,
    collectives: Collectives,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
    refusal: tuple[FallbackReason, str] | None = None,
) -> Admission:
    """Decide whether the request's documents are reused. Collective: one exchange, a second one where they are not.

    Args:
        documents: the request's artifacts in order, the same on every rank; one may occur several times.
        identity: the engine's.
        deadline_s: seconds this rank may spend before it reports TIMEOUT.
        clock: monotonic seconds.
        refusal: a reason that this rank knows already (no memory for reuse, say) and its explanation.

    Returns:
        The admission, with every document's token ids on every rank, whether reused or not.

    Raises:
        RequestError: an edit outside its document, a token outside the vocabulary; on all ranks.
        StoreError: no rank has the verified tokens of a document, so nobody can even recompute; on all ranks.
        CollectiveError: the ranks were given different requests, or a rank broke; on all ranks.
    """
    expected = Expectation(
        geometry=geometry,
        profile=profile,
        identity=identity,
        tp=TpGeometry.even(geometry, collectives.size),
        rank=collectives.rank,
    )
    found = Examination(documents=documents)
    try:
        reports = _compare(documents, store, expected, collectives, _countdown(deadline_s, clock), refusal, found)
        check_comparable(reports)
        finding = conclude(reports, [document.artifact_id for document in documents])
        if finding is not None:
            # Before the second exchange: after it no rank of this request holds a lease, and what is corrupt can move.
            found.release()
            complete_tokens(found, [report.tokens for report in reports], store, identity, collectives)
            _quarantine(found, store)
            if collectives.rank == 0:
                store.events.fell_back(finding.reason, finding.detail)
        elif collectives.rank == 0 and documents:
            store.events.admitted(len(documents))
        check_documents(documents, found.tokens, geometry.vocab)
    except BaseException:
        found.release()
        raise
    return _admission(documents, found, finding)


def _compare(
    documents: Sequence[Artifact],
    store: ArtifactStore,
    expected: Expectation,
    collectives: Collectives,
    remaining_s: Callable[[], float],
    refusal: tuple[FallbackReason, str] | None,
    found: Examination,
) -> list[RankReport]:
    report = RankReport(request="", completed=False)
    try:
        try:
            request = request_digest(documents)
            examine(documents, store, expected, remaining_s=remaining_s, found=found)
        except RequestError as error:
            request = ""
            found.error = error
        if refusal is not None and documents:
            found.refusals.append((0, *refusal))
        report = found.report(request)
    finally:
        # Whatever happened here, the other ranks are waiting.
        replies = collectives.exchange(report.encode())
    return [RankReport.decode(reply) for reply in replies]


def _countdown(deadline_s: float, clock: Callable[[], float]) -> Callable[[], float]:
    end = clock() + deadline_s
    return lambda: end - clock()


def _quarantine(found: Examination, store: ArtifactStore) -> None:
    for artifact_id, generation, fault in found.suspects:
        try:
            store.quarantine(artifact_id, generation, fault)
        except StoreError as error:
            _log.warning("artifact %s stays in place although it is corrupt: %s", artifact_id, error)


def _admission(documents: Sequence[Artifact], found: Examination, finding: Finding | None) -> Admission:
    admitted = []
    for document, ids in zip(documents, found.tokens, strict=True):
        assert ids is not None
        lease = found.leases[document.artifact_id] if finding is None else None
        admitted.append(AdmittedDocument(artifact_id=document.artifact_id, tokens=ids, lease=lease))
    return Admission(
        documents=tuple(admitted),
        reason=None if finding is None else finding.reason,
        detail=None if finding is None else finding.detail,
        refused=None if finding is None else finding.document,
    )
