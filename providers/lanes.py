"""Lanes: what a worker serves, one partition in one run slot each, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.providers.binding import VARIANTS
from outrider.providers.steady import Steady
from outrider.providers.tally import Tally
from outrider.shm.board import STRONG_ORDER, fence, run_of
from outrider.shm.doorbell import Doorbell

if TYPE_CHECKING:
    from outrider.providers.host import Partition

KEPT = 16  # combinations of layouts whose runs a lane can repeat


class Lane:
    """A partition in one run slot: the words it waits for, the last run it served, and whom it rings afterwards.

    `tally`: of the runs it served, failed ones too; `rest`: how many more need not be timed for it. `failed` says why a
    run failed, for a trace.

    `steady` holds what can be repeated, by the layout numbers of all inputs, and of all targets where there are any, as
    one number: `layouts` is that of the run that is ready.

    `followers` are the lanes of this worker and slot that wait for it before all others: no word of theirs can come
    earlier, so nobody looks at them until this lane has served the run.

    `what`: what the progress record says while it serves. `words[cancel]` is the word that cancels a run of the slot.
    """

    __slots__ = (
        "partition", "slot", "last", "steady", "layouts", "bells", "followers", "tally", "rest", "failed", "what",
        "words", "cancel", "_first", "_others", "_targets",
    )  # fmt: skip
    words: memoryview
    cancel: int

    def __init__(self, partition: Partition, slot: int, bells: Sequence[Doorbell], what: int = 0) -> None:
        self.partition = partition
        self.slot = slot
        self.what = what
        self.bells = tuple(bell.fileno() for bell in bells)
        self.followers: list[Lane] = []
        self.last = 0
        self.layouts = 0
        self.tally = Tally()
        self.rest = 0
        self.failed = ""
        self.steady: dict[int, Steady] = {}
        self._first, *others = [(port.reader.words, port.reader.index(port.edge, slot)) for port in partition.inputs]
        self._others = tuple(others)
        self._targets = partition.targets

    def total(self) -> tuple[int, float]:
        """(runs, seconds) served so far. The next run will be timed."""
        rest, self.rest = self.rest, 0
        return self.tally.total(rest)

    def ready(self) -> int:
        """The run to serve now, or 0."""
        words, index = self._first
        word = words[index]
        run: int = word >> 16
        if run <= self.last:
            return 0
        layouts = word & 0xFFFF
        for words, index in self._others:
            word = words[index]
            if word >> 16 != run:
                return 0
            layouts = layouts << 16 | word & 0xFFFF
        if not STRONG_ORDER:
            fence()
        self.layouts = self._targets.joined(self.slot, layouts) if self._targets else layouts
        return run

    def keep(self, steady: Steady) -> None:
        """Repeat this whenever inputs come in the layouts of the present run."""
        if len(self.steady) >= KEPT and self.layouts not in self.steady:
            self.steady.pop(next(iter(self.steady)))
        if steady.pooled:
            steady.other = last = self.steady.get(self.layouts)
            for _ in range(VARIANTS - 2):
                last = None if last is None else last.other
            if last is not None:
                last.other = None
        self.steady[self.layouts] = steady


class LaneGroup:
    """The lanes of one slot: `waiting` are those that may become ready now, in the order of the plan.

    A run of the slot is here from the coordinator's start word, `words[start]`, until all lanes have served it: `ended`
    is the last that they all have. The word `words[cancel]` names one that is cancelled.
    """

    __slots__ = ("words", "start", "cancel", "first", "count", "waiting", "left", "ended")

    def __init__(self, words: memoryview, start: int, cancel: int) -> None:
        self.words = words
        self.start = start
        self.cancel = cancel
        self.first: list[Lane] = []  # those that wait for no lane of this worker
        self.count = 0
        self.waiting: list[Lane] = []
        self.left = 0
        self.ended = 0

    def add(self, lane: Lane, after: Lane | None) -> None:
        """Add a lane; `after` is the one of this group that it follows."""
        lane.words, lane.cancel = self.words, self.cancel
        (self.first if after is None else after.followers).append(lane)
        self.count += 1
        self.waiting, self.left = list(self.first), self.count

    def resume(self) -> None:
        """Go on from what the lanes have served (`Lane.last`): all of the present run, part of it, or nothing."""
        run = self.run()
        waiting = list(self.first)
        self.waiting, self.left = [], 0
        for lane in waiting:  # grows while it is walked
            if lane.last >= run:
                waiting += lane.followers
            else:
                self.waiting.append(lane)
        self.left = self.count - (len(waiting) - len(self.waiting))
        if self.left:
            self.ended = run - 1
        else:
            self.waiting, self.left, self.ended = list(self.first), self.count, run

    def run(self) -> int:
        """The run that the start word names."""
        return run_of(self.words[self.start])

    def served(self, position: int) -> bool:
        """The lane at this position of `waiting` has served the run; True if it was the last, and all wait anew."""
        if self.count == 1:
            self.ended = self.waiting[0].last
            return True
        lane = self.waiting.pop(position)
        self.left -= 1
        if self.left:
            self.waiting += lane.followers
            return False
        self.waiting[:] = self.first
        self.left, self.ended = self.count, lane.last
        return True


class Present:
    """The lane that this worker serves now, for whoever works for its run."""

    __slots__ = ("lane",)

    def __init__(self) -> None:
        self.lane: Lane | None = None

    def cancelled(self) -> bool:
        """Whether the run that is being served was cancelled; False where none is."""
        lane = self.lane
        return lane is not None and lane.words[lane.cancel] >> 16 == lane.last


def serve_ready(groups: Sequence[LaneGroup], serve: Callable[[Lane, int], object]) -> None:
    """Serve every lane that is ready or becomes so by that, one of the oldest run first each time."""
    only: LaneGroup | None = None
    for group in groups:
        if group.words[group.start] >> 16 > group.ended:
            if only is not None:
                break
            only = group
    else:  # the common case, without a list
        if only is not None:
            _serve_group(only, serve)
        return
    begun = [group for group in groups if group.words[group.start] >> 16 > group.ended]
    begun.sort(key=LaneGroup.run)
    for place, group in enumerate(begun):
        _serve_group(group, serve, begun[:place])


def _serve_group(group: LaneGroup, serve: Callable[[Lane, int], object], older: Sequence[LaneGroup] = ()) -> None:
    """Serve the lanes of one run; those of `older` runs may become ready meanwhile and come first."""
    position = 0
    passed = False  # a lane was served behind others that were not ready: they may have waited for its words
    waiting = group.waiting
    while True:
        if position == len(waiting):
            if not passed:
                return
            position, passed = 0, False
        lane = waiting[position]
        run = lane.ready()
        if not run:
            position += 1
            continue
        serve(lane, run)
        passed = position > 0
        ended = group.served(position)
        if older:
            serve_ready(older, serve)
        if ended:
            return
