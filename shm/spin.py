"""Looking a while longer before blocking: worth its processor time only where what is waited for comes very soon.

A waiter that blocks is woken 7 to 15 microseconds after the ring; one that still looks sees the word at once. But a
waiter that looks in vain has taken a core from somebody, on small machines from the one it waits for. So spinning is
off by default, bounded, and measures itself: where it mostly fails it stops for a while.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MAX_MICROSECONDS = 1000
SAMPLE = 64  # waits after which a spin is judged
PAUSE = 1024  # waits for which one that failed mostly is not tried


class Spin:
    """One waiter's spin of at most `microseconds` per wait; 0 never spins. Not shared by threads.

    `clock` tells nanoseconds.
    """

    __slots__ = ("wanted", "_nanoseconds", "_clock", "_left", "hits", "tries", "_judged")

    def __init__(self, microseconds: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        if not 0 <= microseconds <= MAX_MICROSECONDS:
            raise ValueError(f"a spin lasts 0 to {MAX_MICROSECONDS} microseconds, not {microseconds}")
        self.wanted = microseconds > 0
        """False where `until` never does anything."""
        self._nanoseconds = microseconds * 1000
        self._clock = clock
        self._left = 0  # waits without spinning to come
        self.tries = 0
        """Waits that spun."""
        self.hits = 0
        """Those of them that did not have to block."""
        self._judged = (0, 0)

    def until(self, look: Callable[[], T | None]) -> T | None:
        """What `look` gives as soon as that is not None; None if that does not happen in time, or it does not try."""
        if not self.wanted or self._pausing():
            return None
        self.tries += 1
        end = self._clock() + self._nanoseconds
        while True:
            found = look()
            if found is not None:
                self.hits += 1
                return found
            if self._clock() >= end:
                return None
            os.sched_yield()  # to whoever else wants this core or, in this process, the interpreter's lock

    def _pausing(self) -> bool:
        if self._left:
            self._left -= 1
            return True
        tries, hits = self.tries - self._judged[0], self.hits - self._judged[1]
        if tries < SAMPLE:
            return False
        self._judged = (self.tries, self.hits)
        if 2 * hits < tries:
            self._left = PAUSE - 1
            return True
        return False
