"""When a worker that died may start again, and which partitions a provider gets no more. Pure: no clock, no process.

    deaths in a row     1    2    3    4    5 and more
    seconds to wait     0    1    2    4    60, the breaker is open; then one trial

A completed partition ends the row. A worker that did not start has not crashed: it is not started again until someone
asks for it. A partition during which the worker died twice in a row is quarantined: the provider is not asked to run
those nodes of that model until it is released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

WAITS = (0.0, 0.0, 1.0, 2.0, 4.0)  # seconds, by deaths in a row
OPEN_AT = len(WAITS)  # deaths in a row
OPEN_SECONDS = 60.0
QUARANTINED_AT = 2  # deaths in a row during one partition


class Restarts:
    """The row of deaths of one provider's worker. `now`: seconds on a clock that never goes back.

    `deaths`: all so far. `in_a_row`: those since a partition was last completed, or since `forget`. `failed`: why the
    last start failed; None if it did not.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self.in_a_row = 0
        self.failed: str | None = None
        self._died = -math.inf

    @property
    def open(self) -> bool:
        """Whether the breaker is open: after five deaths in a row, until a partition completes or it is forgotten."""
        return self.in_a_row >= OPEN_AT

    def died(self, now: float) -> None:
        """A worker that had started died without being asked to."""
        self.deaths += 1
        self.in_a_row += 1
        self._died = now

    def completed(self) -> None:
        """A partition was completed since the last death."""
        self.in_a_row = 0

    def boot_failed(self, reason: str) -> None:
        """The provider did not start, for this reason: no crash, and no loop."""
        self.failed = reason

    def wait(self, now: float) -> float:
        """Seconds until the next incarnation may be started; 0.0: now; inf: not before `forget`."""
        if self.failed is not None:
            return math.inf
        seconds = OPEN_SECONDS if self.open else WAITS[self.in_a_row]
        return max(0.0, self._died + seconds - now) if seconds else 0.0

    def reason(self) -> str:
        """Why it may not be started now, where it may not."""
        if self.failed is not None:
            return f"it did not start again: {self.failed}"
        return f"it died {self.in_a_row} times in a row"

    def forget(self) -> None:
        """Someone asked for a restart: what was before does not count. `deaths` stays."""
        self.in_a_row = 0
        self.failed = None


class Quarantine:
    """The partitions of a fleet that providers get no more.

    A partition is known by its model (any text that tells models apart) and the names of its nodes. What is quarantined
    stays so until its provider is released.
    """

    def __init__(self) -> None:
        self._deaths: dict[tuple[str, str, tuple[str, ...]], int] = {}  # (provider, model, nodes) -> deaths in a row
        self._last: dict[tuple[str, str, tuple[str, ...]], int] = {}  # the same -> which death of the worker was last

    def blame(self, model: str, nodes: Sequence[str], provider: str, death: int | None = None) -> bool:
        """The provider's worker died while this partition was running. True if that is quarantined now.

        `death`: which one of its worker, counted from 1: one for which this partition was not to blame ends the row.
        """
        key = (provider, model, tuple(nodes))
        if death is not None:
            if death - self._last.get(key, death) > 1 and self._deaths.get(key, 0) < QUARANTINED_AT:
                self._deaths.pop(key, None)
            self._last[key] = death
        self._deaths[key] = self._deaths.get(key, 0) + 1
        return self._deaths[key] >= QUARANTINED_AT

    def completed(self, model: str, nodes: Sequence[str], provider: str) -> None:
        """This partition was completed there: earlier deaths in it count no more, unless it is quarantined already."""
        key = (provider, model, tuple(nodes))
        if self._deaths.get(key, 0) < QUARANTINED_AT:
            self._deaths.pop(key, None)

    def holds(self, model: str, provider: str) -> list[tuple[str, ...]]:
        """The nodes of each quarantined partition of this model and provider."""
        return [
            nodes
            for (blamed, where, nodes), deaths in self._deaths.items()
            if (blamed, where) == (provider, model) and deaths >= QUARANTINED_AT
        ]

    def release(self, provider: str) -> None:
        """Someone asked for a restart of this provider: it is blamed for nothing any more."""
        self._deaths = {key: deaths for key, deaths in self._deaths.items() if key[0] != provider}

    def of(self, provider: str) -> list[dict[str, Any]]:
        """What is quarantined for a provider, for `health()`: [{model, nodes, deaths}], plain data."""
        return [
            {"model": model, "nodes": list(nodes), "deaths": deaths}
            for (blamed, model, nodes), deaths in self._deaths.items()
            if blamed == provider and deaths >= QUARANTINED_AT
        ]
