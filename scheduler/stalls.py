"""Work that does not move: what is seen at look after look, and the warning about workers of which that is true.

Nothing is measured in the workers. Whoever wants to know looks from time to time at their progress records; what is
there unchanged has been there since the first of those looks, so it is noticed up to one look late, never too early.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from outrider.providers.wire.failures import first_names
from outrider.scheduler import dumps
from outrider.shm.progress import RUN

if TYPE_CHECKING:
    from outrider.scheduler.monitor import Monitor
    from outrider.scheduler.worker import Incarnation

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


@dataclass(frozen=True)
class _Place:
    """Where a worker is in its work."""

    one: Incarnation
    run: int
    slot: int
    partition: int
    step: int


class StallWarnings:
    """Warns through the logger outrider.fleet about workers that stay at one step of a run. On the monitor's thread."""

    FIRST = 30.0  # seconds without progress until the first warning
    AGAIN = 60.0  # seconds until each further one
    EVERY = 10.0  # seconds between two looks

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._log = monitor.log_queue.logger("outrider.fleet")
        self._stall = Stall(self.FIRST, self.AGAIN)
        self._since: dict[_Place, float] = {}

    def look(self) -> None:
        """Look now, and again later."""
        now = time.monotonic()
        found = dict(filter(None, (self._at(worker.current) for worker in self._monitor.workers)))
        self._since = {place: self._since.get(place, now) for place in found}
        for place in self._stall.look(now, found):
            self._warn(place, found[place], now - self._since[place])
        for listener in list(self._monitor.listeners.values()):
            listener.look()
        self._monitor.call_later(self.EVERY, self.look)

    def _at(self, one: Incarnation) -> tuple[_Place, list[str]] | None:
        """Where it is in a run, and the nodes of the partition there."""
        doing = None if one.progress is None or not one.alive else one.progress.read()
        if doing is None or doing.kind != RUN:
            return None
        listener = self._monitor.listeners.get(doing.session)
        told = None if listener is None else listener.running(doing.slot, doing.partition)
        if told is None:
            return None
        run, nodes = told
        return _Place(one, run, doing.slot, doing.partition, doing.step), nodes

    def _warn(self, place: _Place, nodes: list[str], seconds: float) -> None:
        where = f"unit {place.step} of partition {place.partition} ({first_names(nodes)}) of run {place.run}"

        def warn(stack: str) -> None:
            self._log.warning(
                "worker %s (incarnation %d) has been at %s for at least %.0f s. %s",
                place.one.worker.name,
                place.one.number,
                where,
                seconds,
                f"Its Python stack:\n{stack}" if stack else "It gives no Python stack.",
            )

        dumps.then(self._monitor, place.one, warn)
