"""The tenants' artifact stores of one rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from trt_redknot.artifacts.store import ArtifactStore
from trt_redknot.observability.events import AllEvents, StoreEvents
from trt_redknot.observability.logs import StoreLog
from trt_redknot.serving.config import ServingConfig

# Stores that are kept open; each remembers which files it has verified.
_STORES = 64
# Seconds that the engine's thread, and with it every request, waits for a lock of another process.
_LOCK_TIMEOUT_S = 2.0


@dataclass(kw_only=True)
class Stores:
    """Stores by tenant, opened when they are first needed. Not thread-safe."""

    config: ServingConfig
    events: Callable[[], StoreEvents | None] = field(default=lambda: None)
    _open: OrderedDict[str, ArtifactStore] = field(default_factory=OrderedDict)

    def __getitem__(self, tenant: str) -> ArtifactStore:
        """Raises StoreError: the store's root is not a folder, or the tenant's name cannot be a namespace."""
        store = self._open.get(tenant)
        if store is None:
            more = self.events()
            log = StoreLog(tenant)
            store = ArtifactStore(
                self.config.store, self.config.capacity_bytes, tenant, lock_timeout_s=_LOCK_TIMEOUT_S,
                events=log if more is None else AllEvents(log, more),
            )  # fmt: skip
            self._open[tenant] = store
        self._open.move_to_end(tenant)
        if len(self._open) > _STORES:
            self._open.popitem(last=False)
        return store
