"""All sessions that a dead worker served load their programs into its successor before any of them goes on there.

Otherwise the partition that kills the worker could do so again while another session still loads, which would suffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Muster:
    """Of one incarnation: the sessions that are expected. Used by any thread."""

    def __init__(self, sessions: Iterable[int] = ()) -> None:
        self._expected = set(sessions)
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)

    def arrive(self, session: int) -> None:
        """A session has loaded its part, or does not come."""
        with self._lock:
            self._expected.discard(session)
            self._told.notify_all()

    def complete(self, timeout: float) -> bool:
        """Wait until all are here; False after `timeout` seconds."""
        with self._lock:
            return self._told.wait_for(lambda: not self._expected, timeout)
