"""Ops that note what is called on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# How weights are held and faults are told: no part of a forward pass.
NO_OPS = {"prepared", "check"}


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """An op and its attributes: what is passed by name."""

    name: str
    attributes: Mapping[str, Any]


@dataclass(kw_only=True)
class RecordingOps:
    """Passes every op on to another backend."""

    ops: Any
    calls: list[OpCall] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if name in NO_OPS or not callable(op):
            return op

        def call(*arguments: Any, **attributes: Any) -> Any:
            self.calls.append(OpCall(name=name, attributes=attributes))
            return op(*arguments, **attributes)

        return call
