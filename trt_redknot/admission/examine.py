"""One rank's look at the artifacts of a request: certificates and tokens of all documents first, then every file."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.admission.report import RankReport
from trt_redknot.artifacts.certificate import Certificate, certified_ranks
from trt_redknot.artifacts.documents import checked_tokens
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault, MisplacedError
from trt_redknot.artifacts.identity import ArtifactIdentity, TpGeometry, artifact_id_of
from trt_redknot.artifacts.layout import plan_files
from trt_redknot.artifacts.lease import Lease
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.collectives.agreement import error_to_json
from trt_redknot.config.geometry import ModelGeometry
from trt_redknot.config.profile import SplitProfile
from trt_redknot.digests import digest_json, digest_tokens
from trt_redknot.errors import RequestError, StoreError
from trt_redknot.request.request import Artifact

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_SOUND_BUT_UNFIT = frozenset({ArtifactFault.MISSING, ArtifactFault.CERTIFICATE_VERSION})
_REASONS = {
    ArtifactFault.MISSING: FallbackReason.MISSING_ARTIFACT,
    ArtifactFault.CERTIFICATE_MISSING: FallbackReason.MISSING_ARTIFACT,
    ArtifactFault.CERTIFICATE_MISPLACED: FallbackReason.TOKEN_MISMATCH,
    ArtifactFault.CERTIFICATE_GENERATION: FallbackReason.STALE_GENERATION,
    ArtifactFault.TOKENS: FallbackReason.TOKEN_MISMATCH,
}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What an engine needs of every artifact."""

    geometry: ModelGeometry
    profile: SplitProfile
    identity: ArtifactIdentity
    tp: TpGeometry
    rank: int


class _Refusal(Exception):  # noqa: N818 - never leaves this module
    """A reason found while examining one document."""

    def __init__(self, reason: FallbackReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class Examination:
    """What a rank holds after its look. `suspects` are (artifact id, generation, fault) to be quarantined later."""

    documents: Sequence[Artifact]
    leases: dict[str, Lease] = field(default_factory=dict)
    tokens: list[NDArray[np.int64] | None] = field(default_factory=list)
    identities: dict[int, ArtifactIdentity] = field(default_factory=dict)
    suspects: list[tuple[str, int, str]] = field(default_factory=list)
    generations: list[int | None] = field(default_factory=list)
    refusals: list[tuple[int, FallbackReason, str]] = field(default_factory=list)
    error: RequestError | None = None

    def release(self) -> None:
        for lease in self.leases.values():
            lease.close()
        self.leases.clear()

    def report(self, request: str) -> RankReport:
        order = list(FallbackReason)
        first = min(self.refusals, key=lambda refusal: (order.index(refusal[1]), refusal[0]), default=None)
        complete = not self.refusals and self.error is None
        certificates = (
            [self.leases[document.artifact_id].certificate for document in self.documents] if complete else []
        )
        return RankReport(
            request=request,
            completed=True,
            reason=first[1] if first else None,
            document=first[0] if first else None,
            detail=first[2] if first else None,
            certificates=digest_json([each.agreement_digest for each in certificates]) if complete else None,
            generations=tuple(self.generations),
            tokens=tuple(tokens is not None for tokens in self.tokens),
            error=None if self.error is None else error_to_json(self.error),
        )


def request_digest(documents: Sequence[Artifact]) -> str:
    """Digest of ids, edits and given tokens; raises RequestError where they are not what they should be."""
    described = []
    for document in documents:
        try:
            edits = sorted((int(position), int(token)) for position, token in document.edits.items())
            tokens = None if document.tokens is None else digest_tokens(np.asarray(document.tokens, dtype=np.int64))
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"artifact {document.artifact_id!s:.64} has ill-formed edits or tokens: {error}"
            ) from error
        described.append([str(document.artifact_id), edits, tokens])
    return digest_json(described)


def examine(
    documents: Sequence[Artifact],
    store: ArtifactStore,
    expected: Expectation,
    *,
    remaining_s: Callable[[], float],
    found: Examination,
) -> None:
    """Fill `found`. Whatever is wrong with an artifact is recorded there; what is raised is nobody's expectation.

    Args:
        remaining_s: seconds left; looked at between documents, files and chunks of files.
    """
    found.generations.extend([None] * len(documents))
    found.tokens.extend([None] * len(documents))
    for index, document in enumerate(documents):
        if document.tokens is not None:
            try:
                found.tokens[index] = checked_tokens(document.tokens, expected.geometry.vocab)
            except RequestError as error:
                found.error = error
                return
    for index, document in enumerate(documents):
        _guarded(found, index, partial(_certify, index, document, store, expected, remaining_s, found))
    if found.refusals:
        return
    for index, document in enumerate(documents):
        lease = found.leases[document.artifact_id]
        _guarded(found, index, partial(lease.verify, partial(_check_time, remaining_s)))
        if found.refusals:
            return


def _guarded(found: Examination, index: int, look: Callable[[], None]) -> None:
    artifact_id = found.documents[index].artifact_id
    try:
        look()
    except _Refusal as refusal:
        found.refusals.append((index, refusal.reason, str(refusal)))
    except ArtifactError as error:
        reason = _reason_of(error)
        found.refusals.append((index, reason, str(error)))
        generation = found.generations[index]
        if generation is not None and reason is not FallbackReason.CAPACITY and error.fault not in _SOUND_BUT_UNFIT:
            found.suspects.append((artifact_id, generation, f"{error.fault}: {error}"))
    except StoreError as error:
        found.refusals.append((index, FallbackReason.TIMEOUT, str(error)))
    except OSError as error:
        exhausted = error.errno in _EXHAUSTED
        reason = FallbackReason.CAPACITY if exhausted else FallbackReason.CORRUPT_FILE
        found.refusals.append((index, reason, f"{error.strerror or error}: {error.filename or artifact_id}"))


def _certify(
    index: int,
    document: Artifact,
    store: ArtifactStore,
    expected: Expectation,
    remaining_s: Callable[[], float],
    found: Examination,
) -> None:
    """Certificate and tokens of one document."""
    _check_time(remaining_s)
    artifact_id = document.artifact_id
    lease = found.leases.get(artifact_id)
    if lease is None:
        found.generations[index] = generation = store.newest(artifact_id)
        try:
            lease = store.open(
                artifact_id,
                rank=expected.rank,
                generation=generation,
                verify=False,
                timeout_s=min(max(0.0, remaining_s()), store.lock_timeout_s),
            )
        except MisplacedError as error:
            _blame_identity(error, artifact_id, expected, found, index)
            raise
        found.leases[artifact_id] = lease
    found.generations[index] = lease.generation
    tokens = lease.tokens()
    if document.tokens is None:
        found.tokens[index] = tokens
        found.identities[index] = lease.certificate.identity
    elif digest_tokens(found.tokens[index]) != lease.certificate.token_digest:  # type: ignore[arg-type]
        raise _Refusal(FallbackReason.TOKEN_MISMATCH, "the tokens given with the request are not the artifact's")
    _check_fit(lease.certificate, expected)


def _check_fit(certificate: Certificate, expected: Expectation) -> None:
    _check_identity(certificate, expected)
    if certificate.ranks != certified_ranks(expected.tp):
        detail = f"the artifact was built by {certificate.tp_size} ranks, the engine has {expected.tp.size}"
        raise _Refusal(FallbackReason.INCOMPATIBLE_TP_GEOMETRY, detail)
    _check_complete(certificate, expected)


def _check_identity(certificate: Certificate, expected: Expectation) -> None:
    theirs, ours = certificate.identity, expected.identity
    for reason, name in (
        (FallbackReason.CHECKPOINT_MISMATCH, "checkpoint_fingerprint"),
        (FallbackReason.CHECKPOINT_MISMATCH, "geometry_digest"),
        (FallbackReason.CHECKPOINT_MISMATCH, "rope_digest"),
        (FallbackReason.PROFILE_MISMATCH, "profile_digest"),
        (FallbackReason.PROFILE_MISMATCH, "format"),
    ):
        if getattr(theirs, name) != getattr(ours, name):
            detail = f"the artifact's {name} is {getattr(theirs, name)}, the engine's {getattr(ours, name)}"
            raise _Refusal(reason, detail)


def _blame_identity(
    error: MisplacedError, artifact_id: str, expected: Expectation, found: Examination, index: int
) -> None:
    """Refuse a certificate of the right document by another checkpoint or profile for what it is, not as misplaced."""
    theirs = error.certificate
    if artifact_id_of(theirs.namespace, theirs.token_digest, expected.identity) != artifact_id:
        return
    generation = found.generations[index]
    if generation is not None:
        found.suspects.append((artifact_id, generation, f"{error.fault}: {error}"))
    _check_identity(theirs, expected)


def _check_complete(certificate: Certificate, expected: Expectation) -> None:
    layers = tuple(range(expected.geometry.layers))
    if certificate.layers != layers:
        absent = sorted(set(layers) - set(certificate.layers))
        raise _Refusal(FallbackReason.MISSING_LAYER, f"the certificate lacks layers {absent}")
    plans = plan_files(
        expected.geometry,
        expected.profile,
        tokens=certificate.token_count,
        tp_size=expected.tp.size,
        form=certificate.artifact_format,
    )
    sizes = {file.path: file.size for file in certificate.files}
    for plan in plans:
        if plan.path not in sizes:
            raise _Refusal(FallbackReason.MISSING_LAYER, f"the certificate lists no {plan.path}")
        if sizes[plan.path] != plan.bytes:
            detail = f"the certificate gives {plan.path} {sizes[plan.path]} bytes, the engine expects {plan.bytes}"
            raise _Refusal(FallbackReason.CORRUPT_FILE, detail)


def _check_time(remaining_s: Callable[[], float]) -> None:
    if remaining_s() <= 0:
        raise _Refusal(FallbackReason.TIMEOUT, "the deadline of the request passed")


def _reason_of(error: ArtifactError) -> FallbackReason:
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in _EXHAUSTED:
        return FallbackReason.CAPACITY
    if error.fault is ArtifactFault.FILE_MISSING and "/group-" in str(error.path):
        return FallbackReason.MISSING_LAYER
    return _REASONS.get(error.fault, FallbackReason.CORRUPT_FILE)
