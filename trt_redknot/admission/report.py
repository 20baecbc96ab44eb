"""What one rank found out about a request's artifacts, as it travels; and what follows from all ranks' reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.collectives.agreement import error_from_json
from trt_redknot.errors import CollectiveError


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's side.

    Attributes:
        request: digest of the documents as this rank was given them.
        completed: False where the examination ended in an exception nobody foresaw.
        reason: why this rank cannot reuse, None where it can.
        document: index of the document that `reason` is about.
        detail: the same for people.
        certificates: digest of all certificates without generation and time; None where one is missing or unfit.
        generations: per document, the generation this rank holds.
        tokens: per document, whether this rank has its verified token ids.
        error: the request itself is wrong (a RequestError as data).
    """

    request: str
    completed: bool
    reason: FallbackReason | None = None
    document: int | None = None
    detail: str | None = None
    certificates: str | None = None
    generations: tuple[int | None, ...] = ()
    tokens: tuple[bool, ...] = ()
    error: dict[str, str | None] | None = None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> RankReport:
        data = json.loads(payload)
        data["reason"] = None if data["reason"] is None else FallbackReason(data["reason"])
        data["generations"] = tuple(data["generations"])
        data["tokens"] = tuple(data["tokens"])
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A reason to recompute, its explanation for people, and the index of the document it is about, if it is of one."""

    reason: FallbackReason
    detail: str
    document: int | None = None


def check_comparable(reports: Sequence[RankReport]) -> None:
    """Raise on every rank what makes the reports useless: a rank that broke, different requests, a wrong request."""
    for rank, report in enumerate(reports):
        if not report.completed:
            raise CollectiveError(
                "a rank failed while it examined the request's artifacts",
                found=f"rank {rank}",
                remedy="That rank's own error says why.",
            )
    requests = [report.request for report in reports]
    if len(set(requests)) > 1:
        differing = next(rank for rank, request in enumerate(requests) if request != requests[0])
        raise CollectiveError(
            "the ranks were given different documents",
            expected="the same artifacts, edits and tokens on every rank",
            found=f"rank {differing} differs from rank 0",
        )
    for report in reports:
        if report.error is not None:
            raise error_from_json(report.error)


def conclude(reports: Sequence[RankReport], artifact_ids: Sequence[str]) -> Finding | None:
    """The one outcome that every rank draws from the same reports: None is unanimous agreement to reuse.

    Where several reasons were reported, the first in the order of FallbackReason counts.
    """
    findings = [_own(rank, report) for rank, report in enumerate(reports) if report.reason is not None]
    findings += _stale(reports, artifact_ids)
    digests = {report.certificates for report in reports if report.certificates is not None}
    if len(digests) > 1:
        findings.append(
            Finding(reason=FallbackReason.RANK_DISAGREEMENT, detail="the ranks hold different certificates")
        )
    order = list(FallbackReason)
    return min(findings, key=lambda finding: order.index(finding.reason), default=None)


def _own(rank: int, report: RankReport) -> Finding:
    assert report.reason is not None
    where = "" if report.document is None else f", document {report.document}"
    detail = f"rank {rank}{where}: {report.detail}"
    return Finding(reason=report.reason, detail=detail, document=report.document)


def _stale(reports: Sequence[RankReport], artifact_ids: Sequence[str]) -> list[Finding]:
    findings = []
    for document, artifact_id in enumerate(artifact_ids):
        held = {rank: number for rank, report in enumerate(reports) if (number := report.generations[document])}
        newest = max(held.values(), default=0)
        behind = [rank for rank, number in held.items() if number < newest]
        if behind:
            detail = f"artifact {artifact_id}: rank {behind[0]} holds generation {held[behind[0]]}, others {newest}"
            findings.append(Finding(reason=FallbackReason.STALE_GENERATION, detail=detail, document=document))
    return findings
