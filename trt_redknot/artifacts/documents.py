"""Documents as token ids: checked before use, and found again where an artifact is spoiled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trt_redknot.artifacts.faults import ArtifactError
from trt_redknot.artifacts.files import Descriptor
from trt_redknot.artifacts.folder import GENERATION_FOLDER, StoreFolder
from trt_redknot.artifacts.identity import ArtifactIdentity, artifact_id_of
from trt_redknot.artifacts.layout import TOKENS, TOKENS_FILE
from trt_redknot.artifacts.tensorfile import TensorFile
from trt_redknot.digests import digest_tokens
from trt_redknot.errors import RequestError


def checked_tokens(tokens: Sequence[int] | NDArray[np.int64], vocab: int) -> NDArray[np.int64]:
    """Token ids as int64 [n]. RequestError where there are none, or one is not an id of the vocabulary."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise RequestError("a document is not a list of token ids", found=error) from error
    if ids.ndim != 1 or not ids.size:
        raise RequestError("a document has no tokens", expected="at least one token id", found=f"shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise RequestError("a document is not a list of token ids", expected="integers", found=ids.dtype)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        raise RequestError(
            "a document has a token outside the vocabulary",
            expected=f"0 to {vocab - 1}",
            found=f"{ids[outside[0]]} at position {outside[0]}",
        )
    return np.ascontiguousarray(ids, dtype=np.int64)


def recover_tokens(store: StoreFolder, artifact_id: str, identity: ArtifactIdentity) -> NDArray[np.int64] | None:
    """Token ids int64 [n] of any generation, quarantined or not, that with `identity` give `artifact_id`; else None."""
    numbers = reversed(store.generations(artifact_id, certified=False))
    places = [store.generation(artifact_id, number) for number in numbers]
    places += [place / GENERATION_FOLDER for place in store.quarantined(artifact_id)]
    for place in places:
        try:
            ids = _unproved_tokens(store, place)
        except (ArtifactError, OSError):
            continue
        if artifact_id_of(store.namespace, digest_tokens(ids), identity) == artifact_id:
            return ids
    return None


def _unproved_tokens(store: StoreFolder, place: Path) -> NDArray[np.int64]:
    with store.open_root() as root:
        parts = (*place.relative_to(store.root).parts, TOKENS_FILE)
        target = Descriptor(store.files.open_beneath(root.fd, parts, os.O_RDONLY | os.O_NONBLOCK))
    with target:
        file = TensorFile(target.fd, os.fstat(target.fd).st_size, label=str(place / TOKENS_FILE), files=store.files)
        ids: NDArray[np.int64] = file.tensor(TOKENS).to(torch.int64).reshape(-1).numpy().copy()
        return ids
