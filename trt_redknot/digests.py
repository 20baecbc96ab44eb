"""Digests: BLAKE3 over canonical bytes. The only place that knows how anything is hashed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from blake3 import blake3


def digest_bytes(*parts: bytes) -> str:
    """Hex BLAKE3 of length-prefixed parts, so that no two lists of parts collide."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def digest_json(value: object) -> str:
    """Hex BLAKE3 of a JSON value in canonical form (sorted keys, no spaces)."""
    return digest_bytes(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def digest_tokens(tokens: list[int] | np.ndarray) -> str:
    """Hex BLAKE3 of token ids as little-endian int64."""
    return digest_bytes(np.asarray(tokens, dtype="<i8").tobytes())


def digest_file(path: Path) -> str:
    """Hex BLAKE3 of a file's content (memory-mapped; raises OSError as the file system does)."""
    hasher = blake3(max_threads=1)
    hasher.update_mmap(path)
    return hasher.hexdigest()
