"""Token ids of a request's documents for the recompute arm, which wants their tokens and nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trt_redknot.admission.examine import Examination, request_digest
from trt_redknot.admission.report import RankReport, check_comparable
from trt_redknot.admission.tokens import check_documents, complete_tokens
from trt_redknot.artifacts.documents import checked_tokens
from trt_redknot.artifacts.identity import ArtifactIdentity
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.collectives.agreement import error_to_json
from trt_redknot.collectives.base import Collectives
from trt_redknot.errors import RequestError, StoreError
from trt_redknot.request.request import Artifact


def document_tokens(
    documents: Sequence[Artifact],
    store: ArtifactStore,
    *,
    identity: ArtifactIdentity,
    collectives: Collectives,
    vocab: int,
) -> list[NDArray[np.int64]]:
    """The documents' token ids (int64 [n], edits not applied), the same on every rank. Collective.

    Tokens given with the request count first; then those of the artifact, of which nothing else is read or has to fit.

    Raises:
        RequestError: an edit outside its document, a token outside the vocabulary; on all ranks.
        StoreError: no rank has the verified tokens of a document; on all ranks.
        CollectiveError: the ranks were given different requests, or a rank broke; on all ranks.
    """
    found = Examination(documents=documents)
    report = RankReport(request="", completed=False)
    try:
        report = _look(documents, store, identity, vocab, found)
    finally:
        # Whatever happened here, the other ranks are waiting.
        replies = collectives.exchange(report.encode())
    reports = [RankReport.decode(reply) for reply in replies]
    check_comparable(reports)
    known = [each.tokens for each in reports]
    if not all(all(rank) for rank in known):
        complete_tokens(found, known, store, identity, collectives)
    check_documents(documents, found.tokens, vocab)
    return [ids for ids in found.tokens if ids is not None]


def _look(
    documents: Sequence[Artifact], store: ArtifactStore, identity: ArtifactIdentity, vocab: int, found: Examination
) -> RankReport:
    found.tokens.extend([None] * len(documents))
    try:
        request = request_digest(documents)
        for index, document in enumerate(documents):
            if document.tokens is not None:
                found.tokens[index] = checked_tokens(document.tokens, vocab)
            else:
                _read(index, document.artifact_id, store, identity, found)
    except RequestError as error:
        return RankReport(request="", completed=True, error=error_to_json(error))
    return RankReport(request=request, completed=True, tokens=tuple(ids is not None for ids in found.tokens))


def _read(index: int, artifact_id: str, store: ArtifactStore, identity: ArtifactIdentity, found: Examination) -> None:
    try:
        with store.open(artifact_id, verify=False) as lease:
            found.tokens[index] = lease.tokens()
            found.identities[index] = lease.certificate.identity
    except (StoreError, OSError):
        found.tokens[index] = store.read_tokens(artifact_id, identity)
