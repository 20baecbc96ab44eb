"""What a store and admission tell while they work. Whoever wants to know hands in an object with these methods."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Lookup(StrEnum):
    """Outcome of opening an artifact. REFUSED: it is there and corrupt, or nobody let go of it in time."""

    HIT = "hit"
    MISS = "miss"
    REFUSED = "refused"


class Purpose(StrEnum):
    """Why an artifact is looked up: to be read, or to see whether it has to be built."""

    READ = "read"
    BUILD = "build"


class Tier(StrEnum):
    """Where artifact bytes come from. DISK: files read and hashed. HOST: stored rows handed out of the memory map.
    PINNED, DEVICE: an engine's tiers of host and device memory."""

    DISK = "disk"
    HOST = "host"
    PINNED = "pinned"
    DEVICE = "device"


class StoreEvents(Protocol):
    """Every method returns at once and never raises. Calls may come from several threads."""

    def looked_up(self, artifact_id: str, outcome: Lookup, purpose: Purpose) -> None: ...

    def moved(self, tier: Tier, bytes: int) -> None: ...

    def built(self, artifact_id: str, generation: int, *, bytes: int, seconds: float) -> None: ...

    def evicted(self, artifact_id: str, generation: int, bytes: int) -> None: ...

    def quarantined(self, artifact_id: str, generation: int, reason: str) -> None: ...

    def admitted(self, documents: int) -> None: ...

    def fell_back(self, reason: str, detail: str) -> None: ...


class NoEvents:
    """Nobody wants to know."""

    def looked_up(self, artifact_id: str, outcome: Lookup, purpose: Purpose) -> None:
        return None

    def moved(self, tier: Tier, bytes: int) -> None:
        return None

    def built(self, artifact_id: str, generation: int, *, bytes: int, seconds: float) -> None:
        return None

    def evicted(self, artifact_id: str, generation: int, bytes: int) -> None:
        return None

    def quarantined(self, artifact_id: str, generation: int, reason: str) -> None:
        return None

    def admitted(self, documents: int) -> None:
        return None

    def fell_back(self, reason: str, detail: str) -> None:
        return None


class AllEvents:
    """Tells several listeners, in order."""

    def __init__(self, *listeners: StoreEvents) -> None:
        self._listeners = listeners

    def looked_up(self, artifact_id: str, outcome: Lookup, purpose: Purpose) -> None:
        for listener in self._listeners:
            listener.looked_up(artifact_id, outcome, purpose)

    def moved(self, tier: Tier, bytes: int) -> None:
        for listener in self._listeners:
            listener.moved(tier, bytes)

    def built(self, artifact_id: str, generation: int, *, bytes: int, seconds: float) -> None:
        for listener in self._listeners:
            listener.built(artifact_id, generation, bytes=bytes, seconds=seconds)

    def evicted(self, artifact_id: str, generation: int, bytes: int) -> None:
        for listener in self._listeners:
            listener.evicted(artifact_id, generation, bytes)

    def quarantined(self, artifact_id: str, generation: int, reason: str) -> None:
        for listener in self._listeners:
            listener.quarantined(artifact_id, generation, reason)

    def admitted(self, documents: int) -> None:
        for listener in self._listeners:
            listener.admitted(documents)

    def fell_back(self, reason: str, detail: str) -> None:
        for listener in self._listeners:
            listener.fell_back(reason, detail)
