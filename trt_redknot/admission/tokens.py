"""Token ids for recomputation: whichever rank has a document's verified ids sends them to those that have not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from trt_redknot.admission.examine import Examination
from trt_redknot.artifacts.documents import checked_tokens
from trt_redknot.artifacts.faults import ArtifactError, ArtifactFault, build_command
from trt_redknot.artifacts.formats import ArtifactFormat
from trt_redknot.artifacts.identity import ArtifactIdentity
from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.collectives.base import Collectives
from trt_redknot.errors import CollectiveError, RequestError
from trt_redknot.request.request import Artifact

_HEADER_BYTES = 8
_TOKEN_BYTES = 8


def complete_tokens(
    found: Examination,
    known: Sequence[Sequence[bool]],
    store: ArtifactStore,
    identity: ArtifactIdentity,
    collectives: Collectives,
) -> None:
    """Fill the gaps of `found.tokens`. Collective, entered by all ranks with the same `known`.

    The lowest rank that has a document's tokens sends them; where none has, every rank looks for them once more,
    without a certificate. Token ids prove themselves: with namespace and identity they give the artifact's id.

    Args:
        known: per rank, per document, whether that rank has the verified token ids.

    Raises:
        ArtifactError: nobody has them; on all ranks.
    """
    documents = found.documents
    wanted = [index for index in range(len(documents)) if not all(rank[index] for rank in known)]
    payload = b""
    try:
        payload = encode_tokens(_offers(wanted, found, known, store, identity, collectives.rank))
    finally:
        # As in the first exchange: the others are waiting, whatever happened here.
        replies = collectives.exchange(payload)
    if not all(replies):
        raise CollectiveError("a rank failed while it sent the request's tokens", found=f"rank {replies.index(b'')}")
    received = [decode_tokens(reply) for reply in replies]
    for index in wanted:
        found.tokens[index] = _first_proved(documents[index].artifact_id, index, received, store)


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """A document's token ids (int64 [n]) and the identity with which they prove themselves."""

    ids: NDArray[np.int64]
    identity: ArtifactIdentity


def _offers(
    wanted: Sequence[int],
    found: Examination,
    known: Sequence[Sequence[bool]],
    store: ArtifactStore,
    identity: ArtifactIdentity,
    rank: int,
) -> dict[int, _Offer]:
    offers = {}
    for index in wanted:
        owners = [owner for owner, has in enumerate(known) if has[index]]
        ids, proof = found.tokens[index], found.identities.get(index, identity)
        if not owners:
            ids, proof = store.read_tokens(found.documents[index].artifact_id, identity), identity
        elif owners[0] != rank:
            continue
        if ids is not None:
            offers[index] = _Offer(ids=ids, identity=proof)
    return offers


def _first_proved(
    artifact_id: str, index: int, received: Sequence[dict[int, _Offer]], store: ArtifactStore
) -> NDArray[np.int64]:
    for offers in received:
        offer = offers.get(index)
        if offer is not None and store.artifact_id(offer.ids, offer.identity) == artifact_id:
            return offer.ids
    raise ArtifactError(
        ArtifactFault.MISSING,
        f"no rank can read the tokens of artifact {artifact_id[:64]}",
        expected=f"document {index} of the request, counted from 0, in the store or with its tokens",
        path=store.root / store.namespace,
        remedy=f"Give its tokens with the request, or build it: {build_command(store.root, store.namespace)}",
    )


def encode_tokens(offers: dict[int, _Offer]) -> bytes:
    table = [[index, len(offer.ids), asdict(offer.identity)] for index, offer in offers.items()]
    header = json.dumps(table).encode()
    body = b"".join(offer.ids.astype("<i8").tobytes() for offer in offers.values())
    return len(header).to_bytes(_HEADER_BYTES, "little") + header + body


def decode_tokens(payload: bytes) -> dict[int, _Offer]:
    start = _HEADER_BYTES + int.from_bytes(payload[:_HEADER_BYTES], "little")
    offers = {}
    for index, count, fields in json.loads(payload[_HEADER_BYTES:start]):
        stop = start + _TOKEN_BYTES * count
        ids = np.frombuffer(payload[start:stop], dtype="<i8").astype(np.int64)
        fields["format"] = ArtifactFormat(fields["format"])
        offers[int(index)] = _Offer(ids=ids, identity=ArtifactIdentity(**fields))
        start = stop
    return offers


def check_documents(documents: Sequence[Artifact], tokens: Sequence[NDArray[np.int64] | None], vocab: int) -> None:
    """Raise RequestError for an edit outside its document or a token outside the vocabulary."""
    for document, ids in zip(documents, tokens, strict=True):
        assert ids is not None
        checked_tokens(ids, vocab)
        for position, token in document.edits.items():
            if not 0 <= position < len(ids):
                raise RequestError(
                    f"an edit lies outside artifact {document.artifact_id}",
                    expected=f"a position from 0 to {len(ids) - 1}",
                    found=position,
                )
            if not 0 <= token < vocab:
                raise RequestError(
                    f"an edit of artifact {document.artifact_id} has a token outside the vocabulary",
                    expected=f"0 to {vocab - 1}",
                    found=f"{token} at position {position}",
                )
