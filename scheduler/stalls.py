"""Work that does not move: what is seen at look after look, and the warning about workers of which that is true.

Nothing is measured in the workers. Whoever wants to know looks from time to time at their progress records; what is
there unchanged has been there since the first of those looks, so it is noticed up to one look late, never too early.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from outrider.providers.wire.failures import first_names
from outrider.scheduler import dumps

if TYPE_CHECKING:
    from outrider.scheduler.monitor import Monitor
    from outrider.scheduler.overdue import Working

Key = TypeVar("Key", bound=Hashable)


class Stall:
    """Which of the things that are seen have been there for `seconds`, and then each `again` seconds. Pure."""

    def __init__(self, seconds: float, again: float | None = None) -> None:
        """`again`: None for the same."""
        self.seconds = seconds
        self.again = seconds if again is None else again
        self._due: dict[Hashable, float] = {}

    def look(self, now: float, seen: Iterable[Key]) -> list[Key]:
        """Those of `seen`, in order, for which it is time. What is not seen is forgotten."""
        keys = list(seen)
        self._due = {key: self._due.get(key, now + self.seconds) for key in keys}
        late = [key for key in keys if self._due[key] <= now]
        for key in late:
            self._due[key] = now + self.again
        return late


class StallWarnings:
    """Warns through the logger outrider.fleet about workers that stay at one step of a run, or do not begin what they
    could. On the monitor's thread."""

    FIRST = 30.0  # seconds without progress until the first warning
    AGAIN = 60.0  # seconds until each further one
    EVERY = 10.0  # seconds between two looks

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._log = monitor.log_queue.logger("outrider.fleet")
        self._stall = Stall(self.FIRST, self.AGAIN)
        self._since: dict[Hashable, float] = {}

    def look(self) -> None:
        """Look now, and again later."""
        now = time.monotonic()
        found = {
            (run, one.key, one.step): one
            for listener in list(self._monitor.listeners.values())
            for run, one in listener.working()
        }
        self._since = {key: self._since.get(key, now) for key in found}
        for key in self._stall.look(now, found):
            self._warn(key[0], found[key], now - self._since[key])
        self._monitor.call_later(self.EVERY, self.look)

    def _warn(self, run: int, at: Working, seconds: float) -> None:
        where = f"partition {at.partition} ({first_names(at.nodes)}) of run {run}"
        what = f"has not begun {where}" if at.step is None else f"has been at unit {at.step} of {where}"

        def warn(stack: str) -> None:
            self._log.warning(
                "worker %s (incarnation %d) %s for at least %.0f s. %s",
                at.one.worker.name,
                at.one.number,
                what,
                seconds,
                f"Its Python stack:\n{stack}" if stack else "It gives no Python stack.",
            )

        dumps.then(self._monitor, at.one, warn)
