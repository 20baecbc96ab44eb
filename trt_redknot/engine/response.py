"""What an engine answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trt_redknot.reports.report import Report
from trt_redknot.request.rows import RowPlan


@dataclass(frozen=True, kw_only=True)
class Response:
    """The answer to one request, the same on every rank.

    Attributes:
        tokens: generated ids, the stop token included.
        first_logits: fp32 [V], the logits that chose the first token.
        finish_reason: ``stop`` after a stop token, else ``length``.
        report: arm, fallback reason, rows, ledgers, fanout histogram, timings.
        plan: the class of every prompt row.
    """

    tokens: list[int]
    first_logits: torch.Tensor
    finish_reason: Literal["stop", "length"]
    report: Report
    plan: RowPlan

    def to_json(self) -> dict[str, object]:
        """Plain JSON values, without the logits."""
        return {"tokens": list(self.tokens), "finish_reason": self.finish_reason, "report": self.report.to_json()}
