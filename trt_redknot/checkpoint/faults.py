"""Faults of a checkpoint, collected and told in one error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trt_redknot.errors import CheckpointError

FaultKind = Literal["unreadable", "missing", "unexpected", "misshapen", "truncated"]

_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Faults:
    """Every fault found so far, by kind: tensor (or file) name and what is wrong with it."""

    found: dict[tuple[FaultKind, str], str] = field(default_factory=dict)

    def add(self, kind: FaultKind, name: str, detail: str) -> None:
        """Remember a fault; the first detail of a tensor stays."""
        self.found.setdefault((kind, name), detail)

    def raise_if_any(self, directory: Path) -> None:
        """Raise one CheckpointError that lists everything, experts with the same fault as one range."""
        if not self.found:
            return
        count = len(self.found)
        raise CheckpointError(
            f"the checkpoint has {count} fault{'s' if count > 1 else ''}",
            found="; ".join(self._lines()),
            path=directory,
            remedy="Fetch or convert the checkpoint again; config.json and the weight files must belong together.",
        )

    def _lines(self) -> list[str]:
        folded: dict[tuple[str, str, str], list[int]] = {}
        for (kind, name), detail in self.found.items():
            match = _EXPERT.fullmatch(name)
            pattern = f"{match[1]}.#.{match[3]}" if match else name
            folded.setdefault((kind, pattern, detail), []).extend([int(match[2])] if match else [])
        return [
            f"{kind} {pattern.replace('#', _ranges(experts)) if experts else pattern} ({detail})"
            for (kind, pattern, detail), experts in folded.items()
        ]


def _ranges(numbers: list[int]) -> str:
    """`3` for one number, `{0-4,7}` for several."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return texts[0] if len(ordered) == 1 else "{" + ",".join(texts) + "}"
