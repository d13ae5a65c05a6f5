"""A thread that commits a fault when nothing was asked of the provider for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial


class IdleThread(threading.Thread):
    """Calls `act` once, `seconds` after a `rests` that no `works` followed. `end` ends it."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        super().__init__(name="chaos", daemon=True)
        self._seconds = seconds
        self._act = act
        self._changed = threading.Condition()
        self._resting = 0  # counts the pauses, negative while there is none
        self._ended = False

    def rests(self) -> None:
        """From now on nothing is asked."""
        with self._changed:
            self._resting = abs(self._resting) + 1
            self._changed.notify()

    def works(self) -> None:
        """Something is asked."""
        with self._changed:
            self._resting = -abs(self._resting)
            self._changed.notify()

    def end(self) -> None:
        """It commits nothing any more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _over(self, pause: int) -> bool:
        return self._ended or self._resting != pause

    def run(self) -> None:
        with self._changed:
            while not self._ended:
                pause = self._resting
                if pause <= 0:
                    self._changed.wait()
                elif not self._changed.wait_for(partial(self._over, pause), self._seconds):
                    break
            if self._ended:
                return
        self._act()
