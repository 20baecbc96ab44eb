"""What an engine that answers by plans is handed: their specifications, and who runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from trt_redknot.engine.tensorrt.profiles import PlanLimits
from trt_redknot.engine.tensorrt.specification import PlanSpec

Tensors = Mapping[str, torch.Tensor]


class PlanRuntime(Protocol):
    """What runs plans. All ranks run the same plans in the same order: some have collectives."""

    def run(self, plan: str, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The outputs of a plan by name, in memory of their own.

        Args:
            tensors: inputs and weights by name, as the plan's specification says; nothing is empty.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PlanBackend:
    """What an engine needs to answer by plans.

    Attributes:
        specs: of all its plans.
        limits: that they were built with.
        runtime: runs them.
    """

    specs: tuple[PlanSpec, ...]
    limits: PlanLimits
    runtime: PlanRuntime
