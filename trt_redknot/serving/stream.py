"""The events of one request, from the thread that computes to whoever reads them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from trt_redknot.serving.messages import DoneEvent, Event, FailedEvent, ServingError, is_final


class Stream:
    """Events in order, the last of them a DoneEvent or a FailedEvent. One thread reads, any thread may cancel.

    Nobody waits for a reader: events are small, and there are never more of them than the tokens or documents that were
    asked for, and one.

    Args:
        on_cancel: tells the service.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._complete = False
        self._exhausted = False

    @property
    def complete(self) -> bool:
        """Whether the last event is there, read or not."""
        return self._complete

    def put(self, event: Event) -> bool:
        """Add an event; False where the last one is there already and this one is dropped."""
        with self._lock:
            if self._complete:
                return False
            self._complete = is_final(event)
            self._events.put(event)
            return True

    def poll(self, timeout_s: float) -> Event | None:
        """The next event; None when none came within `timeout_s` seconds, or none is to come."""
        if self._exhausted:
            return None
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        self._exhausted = is_final(event)
        return event

    def __iter__(self) -> Iterator[Event]:
        while not self._exhausted:
            event = self._events.get()
            self._exhausted = is_final(event)
            yield event

    def cancel(self) -> None:
        """Lose interest. The last event, which says so or tells of an end that came before, still comes."""
        self._on_cancel()

    def result(self) -> DoneEvent:
        """Read to the end. Raises ServingError where the request failed."""
        last: Event | None = None
        for event in self:
            last = event
        if isinstance(last, FailedEvent):
            raise ServingError(last.fault, last.message)
        assert isinstance(last, DoneEvent)
        return last
