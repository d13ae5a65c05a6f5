"""How many runs a lane has served, and how long they took.

In a process that has just been woken, reading the clock twice costs almost a microsecond, and in the steady state each
hop would pay that. So there one run of a few is timed and stands for those after it. Runs that take the general way are
all timed.
"""

from __future__ import annotations

SKIPPED = 16  # runs after one that was timed; one of 17 is, so that shapes which come in turn all have theirs


class Tally:
    """Runs of one lane. The lane counts down how many more may go untimed, and each of them tells nothing else."""

    __slots__ = ("_granted", "_runs", "_seconds", "_last")

    def __init__(self) -> None:
        self._granted = 0
        self._runs = 0
        self._seconds = 0.0
        self._last = 0.0

    def add(self, seconds: float, steady: bool, rest: int) -> int:
        """A run that was timed; `steady`: it stands for those after it. Returns how many may go untimed now.

        `rest`: how many more might have gone untimed before.
        """
        self._settle(rest)
        self._runs += 1
        self._seconds += seconds
        if steady:
            self._last = seconds
            self._granted = SKIPPED
        return self._granted

    def total(self, rest: int) -> tuple[int, float]:
        """(runs, seconds) so far. If the next run is timed, the totals before and after it differ by what it took."""
        self._settle(rest)
        return self._runs, self._seconds

    def _settle(self, rest: int) -> None:
        """Those that were not timed count like the one before them; none is granted any more."""
        skipped, self._granted = self._granted - rest, 0
        self._runs += skipped
        self._seconds += skipped * self._last
