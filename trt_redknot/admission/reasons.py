"""The closed list of reasons for full recomputation (docs/policy.md)."""

from __future__ import annotations

from enum import StrEnum


class FallbackReason(StrEnum):
    """Why a request that named artifacts was recomputed. The order is the precedence when ranks report several."""

    MISSING_ARTIFACT = "missing_artifact"
    CORRUPT_FILE = "corrupt_file"
    MISSING_LAYER = "missing_layer"
    TOKEN_MISMATCH = "token_mismatch"
    CHECKPOINT_MISMATCH = "checkpoint_mismatch"
    PROFILE_MISMATCH = "profile_mismatch"
    INCOMPATIBLE_TP_GEOMETRY = "incompatible_tp_geometry"
    STALE_GENERATION = "stale_generation"
    CAPACITY = "capacity"
    TIMEOUT = "timeout"
    RANK_DISAGREEMENT = "rank_disagreement"
