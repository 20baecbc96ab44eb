"""What every answer carries: which arm ran, the rows by class, four ledgers that are never added up, and timings.

The ledgers measure different things: logical head-rows, physical token-rows, analytic arithmetic, and wall clock
(:class:`Timings`). A sum of two of them has no meaning, so nothing here offers one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal, Self

from trt_redknot.admission.reasons import FallbackReason
from trt_redknot.request.rows import RowPlan
from trt_redknot.request.segments import RowClass

Arm = Literal["reuse", "recompute"]


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Rows of a request by class. `protected + active + omitted == total`.

    Attributes:
        prefix: how many of the omitted rows belong to an exact prefix and therefore ran in no layer at all.
    """

    total: int
    protected: int
    active: int
    omitted: int
    prefix: int

    def __post_init__(self) -> None:
        assert self.protected + self.active + self.omitted == self.total, f"row classes do not partition: {self}"
        assert 0 <= self.prefix <= self.omitted, f"more prefix rows than omitted rows: {self}"

    @classmethod
    def of(cls, plan: RowPlan) -> Self:
        return cls(
            total=plan.rows,
            protected=plan.count(RowClass.PROTECTED),
            active=plan.count(RowClass.ACTIVE),
            omitted=plan.count(RowClass.OMITTED),
            prefix=plan.prefix_rows,
        )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was saved out of a total, both in the ledger's own unit."""

    saved: int
    total: int

    def __post_init__(self) -> None:
        assert 0 <= self.saved <= self.total, f"saved {self.saved} of {self.total}"

    @property
    def share(self) -> float:
        """saved / total, 0 where there was nothing to save."""
        return self.saved / self.total if self.total else 0.0

    def to_json(self) -> dict[str, int | float]:
        return {"saved": self.saved, "total": self.total, "share": self.share}


@dataclass(frozen=True, kw_only=True)
class Ledgers:
    """Three counted ledgers of one prefill; the fourth, wall clock, is measured and kept in :class:`Timings`.

    Attributes:
        logical_head_rows: (layer, head, row) triples whose Local contribution was not computed.
        token_rows: (layer, row) pairs that did not run.
        arithmetic: multiply-adds of the major operators that were not executed.
    """

    logical_head_rows: Ledger
    token_rows: Ledger
    arithmetic: Ledger

    def to_json(self) -> dict[str, dict[str, int | float]]:
        return {
            "logical_head_rows": self.logical_head_rows.to_json(),
            "token_rows": self.token_rows.to_json(),
            "arithmetic": self.arithmetic.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall clock in seconds.

    Attributes:
        ttft_s: model-forward entry to first token.
        prefill_s: the layer walk of all prompt rows.
        decode_s: all tokens after the first.
        admission_s: certificate checks and the unanimity collective.
        late_s: how long the prefill waited for artifact tiles that were read ahead.
        stages: seconds by named stage of the prefill.
    """

    ttft_s: float
    prefill_s: float
    decode_s: float
    admission_s: float
    late_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The account of one answered request.

    Attributes:
        arm: what ran; a request that asked for reuse and was refused has ``recompute``.
        admitted: reuse was asked for and every rank agreed to it.
        fallback_reason: why a request that asked for reuse was recomputed.
        fallback_detail: the same in words, with the file or rank concerned.
        rows: rows by class.
        ledgers: what was saved against full recomputation.
        k_histogram: index k is the number of (row, layer) pairs of the reusable, learned-router layers that ran k
            routed experts in the prefill; empty when no such layer ran.
        timings: the fourth ledger.
        bytes_by_tier: artifact bytes taken, by where they were found (``host``: the memory map of the store's verified
            files, ``pinned`` and ``device``: the engine's tiers), summed over the ranks.
        request_id: the caller's name for the request.
    """

    arm: Arm
    admitted: bool
    fallback_reason: FallbackReason | None
    fallback_detail: str | None
    rows: RowCounts
    ledgers: Ledgers
    k_histogram: list[int]
    timings: Timings
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    request_id: str | None = None

    def __post_init__(self) -> None:
        # A run that claims reuse but recomputed must not come into being.
        assert self.admitted == (self.arm == "reuse"), f"arm {self.arm} with admitted={self.admitted}"
        assert not (self.admitted and self.fallback_reason), f"admitted, and refused for {self.fallback_reason}"

    def to_json(self) -> dict[str, object]:
        """Plain JSON values, keys in the order of the attributes."""
        return {
            "request_id": self.request_id,
            "arm": self.arm,
            "admitted": self.admitted,
            "fallback_reason": None if self.fallback_reason is None else self.fallback_reason.value,
            "fallback_detail": self.fallback_detail,
            "rows": asdict(self.rows),
            "ledgers": self.ledgers.to_json(),
            "k_histogram": list(self.k_histogram),
            "timings": asdict(self.timings),
            "bytes_by_tier": dict(self.bytes_by_tier),
        }
