"""Where a figure comes from. Every table, figure and JSON file of the evaluation names its class."""

from __future__ import annotations

from enum import StrEnum


class Evidence(StrEnum):
    """MEASURED: by the command that shows it. PROJECTED: by a model of what would be measured. ARCHIVED: read from
    files that an earlier command saved."""

    MEASURED = "measured"
    PROJECTED = "projected"
    ARCHIVED = "archived"

    @property
    def sentence(self) -> str:
        """What a reader should know about the class, in one sentence."""
        return {
            Evidence.MEASURED: "Measured by the command that wrote this.",
            Evidence.PROJECTED: "Projected by a model; nothing was run.",
            Evidence.ARCHIVED: "Read from saved results of an earlier run.",
        }[self]
