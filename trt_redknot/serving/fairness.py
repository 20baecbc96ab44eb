"""Whose turn it is: tenants share what the engine does, however many requests each of them has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Waiting items of several tenants. The next one is the oldest of the tenant that was served least.

    Served is counted in tokens (start-time fair queueing). A tenant that comes back after a pause starts level with
    those that are waiting: nobody saves up turns, and nobody pays for what was served while he was alone.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}
        self._served: dict[str, float] = {}
        # What the tenant had been served whose item was taken last.
        self._level = 0.0

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    @property
    def tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._served)

    def put(self, tenant: str, item: Item) -> None:
        if not self._waiting:
            # Whatever was served before, nobody had to wait for it.
            self._level = max(self._served.values(), default=self._level)
            self._forget()
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._level)
        self._waiting[tenant].append(item)

    def take(self, allowed: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """The next item, None where nobody waits. Say with `charge` what it costs.

        Args:
            allowed: items it says no to are passed over, and keep their place.
        """
        # Dictionaries keep their order: among equals the tenant that has waited longest.
        for tenant in sorted(self._waiting, key=self._served.__getitem__):
            item = next((each for each in self._waiting[tenant] if allowed(each)), None)
            if item is not None:
                self._level = max(self._level, self._served[tenant])
                self.remove(tenant, item)
                if tenant in self._waiting:
                    self._waiting[tenant] = self._waiting.pop(tenant)
                self._forget()
                return item
        return None

    def remove(self, tenant: str, item: Item) -> None:
        """Take out an item that waits no longer. ValueError where it does not wait."""
        items = self._waiting.get(tenant, deque())
        items.remove(item)
        if not items:
            self._waiting.pop(tenant, None)

    def charge(self, tenant: str, tokens: float) -> None:
        """Count tokens as served to a tenant; less than none gives some back."""
        self._served[tenant] = self._served.get(tenant, self._level) + tokens

    def _forget(self) -> None:
        """Drop tenants that would start at the common level anyway, so that names do not pile up."""
        for tenant in [name for name, served in self._served.items() if served <= self._level]:
            if tenant not in self._waiting:
                del self._served[tenant]
