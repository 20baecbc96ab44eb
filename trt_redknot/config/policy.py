"""The reuse policy of a request: what to protect, how much to activate, how to end (docs/policy.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_TAU = 0.85


class ReusePolicy(BaseModel):
    """How much of a request is recomputed when its documents have artifacts.

    Attributes:
        budget: share of the candidate rows that run as active rows, 0 (omit them) to 1 (pure head reuse).
        tau: adaptive fanout threshold in the reusable layers; 1 is native routing. At 0.5 or less every row runs three
            experts. Left out: 0.85, or 1 with ``protect="all"`` so that this policy is exact.
        epilogue: ``full`` runs all rows in the trailing fence, ``active`` only the live ones.
        protect: ``default`` is Q + N + D + B + I_top + T; ``all`` protects every row (the exactness test).
        boundary: rows protected at each end of a relocated document; left out: the network's coarsest compression
            window, or its sliding one if that is longer (128 for released networks). Fewer can lose what the document
            before says.
        tail: most rows protected at the end of the request.
        tail_share: the tail is at most this share of the request's rows.
        top_entries: compressed entries whose rows are protected by Indexer score; left out: the network's index_topk.
        deadline_s: seconds the ranks may spend on admission before all recompute with reason ``timeout``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: float = Field(default=0.10, ge=0.0, le=1.0, allow_inf_nan=False)
    tau: float | None = Field(default=None, gt=0.0, le=1.0, allow_inf_nan=False)
    epilogue: Literal["full", "active"] = "full"
    protect: Literal["default", "all"] = "default"
    boundary: int | None = Field(default=None, ge=0)
    tail: int = Field(default=32768, ge=0)
    tail_share: float = Field(default=0.125, ge=0.0, le=1.0, allow_inf_nan=False)
    top_entries: int | None = Field(default=None, ge=0)
    deadline_s: float = Field(default=30.0, gt=0.0, allow_inf_nan=False)

    @property
    def effective_tau(self) -> float:
        if self.tau is not None:
            return self.tau
        return 1.0 if self.protect == "all" else DEFAULT_TAU
