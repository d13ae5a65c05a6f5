"""The steady state of a lane: for inputs in layouts that were there before, a run is a few words and prepared calls.

After a run whose values all have fixed places, what it did is kept: which bound calls it made on which arrays, which
words it wrote. When the inputs come again under the same layout numbers, with the same versions of their records, and
neither its own buffers have moved nor its own numbers got another meaning, the run is that again, with nothing looked
up. Anything else (a new shape, a result in a block of the output pool, a value without a place) takes the general way
in `host.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.providers.contract import Run, Unit
from outrider.providers.wire.failures import fail
from outrider.shm.board import BoardReader, BoardWriter
from outrider.shm.places import Places

Call = tuple[Unit, Run, Sequence[Any]]  # a unit, its bound callable, and the arrays it is called with


class Steady:
    """A run of one lane, ready to be repeated. Only where stores keep their order (`STRONG_ORDER`)."""

    __slots__ = (
        "_words", "_inputs", "_calls", "_units", "_outputs",
        "_slot", "_changes", "_as_of", "_stamps", "_buffers", "_records",
    )  # fmt: skip

    def __init__(
        self,
        board: BoardWriter,
        places: Places,
        slot: int,
        read: Sequence[tuple[BoardReader, int, int]],
        calls: Sequence[Call],
        stamps: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        done: int,
    ) -> None:
        """`read`: (reader, edge, layout number) of inputs and of what says where results are wanted; `outputs`: (edge,
        layout number); `done` is published last.

        `stamps`: (index in `Places.stamps`, value) of the buffers that the calls write.
        """
        self._words = board.words
        self._inputs = tuple((reader.words, *reader.version_at(edge, slot, number)) for reader, edge, number in read)
        self._calls = tuple((call, arguments) for _, call, arguments in calls)
        self._units = tuple(unit for unit, _, _ in calls)
        self._outputs = (*((board.index(edge, slot), number) for edge, number in outputs), (board.index(done, slot), 1))
        self._slot = slot
        self._changes = places.changes
        self._as_of = places.changes[slot]
        self._stamps = places.stamps
        self._buffers = tuple(stamps)
        self._records = tuple(board.version_at(edge, slot, number) for edge, number in outputs)

    def fits(self) -> bool:
        """True if a run whose inputs and targets come under the same layout numbers finds everything as it was."""
        for words, at, version in self._inputs:
            if words[at] != version:
                return False
        return self._changes[self._slot] == self._as_of or self._intact()

    def _intact(self) -> bool:
        """Something of the slot has changed: whether nothing of this lane did."""
        stamps, words = self._stamps, self._words
        if any(stamps[at] != stamp for at, stamp in self._buffers):
            return False
        if any(words[at] != version for at, version in self._records):
            return False
        self._as_of = self._changes[self._slot]
        return True

    def repeat(self, run: int) -> None:
        """Make the calls and publish. Raises what `fail` makes of a call's exception, with nothing published."""
        made = 0
        try:
            for call, arguments in self._calls:
                call(arguments)
                made += 1
        except (Exception, SystemExit) as error:  # a provider may raise anything
            unit = self._units[made]
            fail(unit.nodes, unit.inputs, self._calls[made][1], error)
        base = run << 16
        words = self._words
        for index, number in self._outputs:
            words[index] = base | number
