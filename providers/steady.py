"""The steady state of a lane: for inputs in layouts that were there before, a run is a few words and prepared calls.

After a run whose values all have fixed places, what it did is kept: which bound calls it made on which arrays, which
words it wrote. When the inputs come again under the same layout numbers, with the same versions of their records, and
neither its own buffers have moved nor its own numbers got another meaning, the run is that again, with nothing looked
up. Large results lie in blocks of the output pool, which must be free again. Anything else (a new shape, a value
without a place) takes the general way in `host.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outrider.providers.adapters import NotInPlaceError
from outrider.providers.contract import Run, Unit
from outrider.providers.wire.errors import RunCancelledError
from outrider.providers.wire.failures import fail
from outrider.shm.board import BoardReader, BoardWriter
from outrider.shm.leases import PoolWriter
from outrider.shm.places import Places
from outrider.shm.progress import STEP

Call = tuple[Unit, Run, Sequence[Any]]  # a unit, its bound callable, and the arrays it is called with
Block = tuple[int, int, int]  # of the output pool: number, offset, bytes


class Outcome(NamedTuple):
    """What a partition's run gave.

    `published`: (edge, layout number); `read`: (reader, edge, layout number) of inputs and of what says where results
    are wanted; `calls`: None if they cannot be repeated. The calls write buffers, of which `stamps` are the (index in
    `Places.stamps`, value), and `blocks`.
    """

    published: list[tuple[int, int]]
    read: list[tuple[BoardReader, int, int]]
    calls: list[Call] | None
    stamps: list[tuple[int, int]]
    blocks: list[Block]


class Steady:
    """A run of one lane, ready to be repeated. Only where stores keep their order (`STRONG_ORDER`).

    `other` is one for the same inputs with other blocks of the output pool, of which the caller may hold some.
    """

    __slots__ = (
        "other", "_words", "_inputs", "_calls", "_units", "_outputs",
        "_slot", "_changes", "_as_of", "_stamps", "_buffers", "_records", "_pool", "_blocks",
    )  # fmt: skip

    def __init__(
        self, board: BoardWriter, places: Places, pool: PoolWriter, slot: int, outcome: Outcome, done: int
    ) -> None:
        """`done`: the edge that is published last. Raises ValueError if the outcome has no calls."""
        if outcome.calls is None:
            raise ValueError("a run that cannot be repeated is not kept")
        published = outcome.published
        self.other: Steady | None = None
        self._words = board.words
        self._inputs = tuple(
            (reader.words, *reader.version_at(edge, slot, number)) for reader, edge, number in outcome.read
        )
        self._calls = tuple((call, arguments) for _, call, arguments in outcome.calls)
        self._units = tuple(unit for unit, _, _ in outcome.calls)
        self._outputs = (
            *((board.index(edge, slot), number) for edge, number in published),
            (board.index(done, slot), 1),
        )
        self._slot = slot
        self._changes = places.changes
        self._as_of = places.changes[slot]
        self._stamps = places.stamps
        self._buffers = tuple(outcome.stamps)
        self._records = tuple(board.version_at(edge, slot, number) for edge, number in published)
        self._pool = pool
        self._blocks = tuple(outcome.blocks)

    @property
    def pooled(self) -> bool:
        """Whether it writes blocks of the output pool."""
        return bool(self._blocks)

    def fits(self) -> bool:
        """True if a run whose inputs and targets come under the same layout numbers finds everything as it was."""
        for words, at, version in self._inputs:
            if words[at] != version:
                return False
        for block in self._blocks:
            if not self._pool.is_free(*block):
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

    def repeat(self, run: int, cancelled: Callable[[], bool], doing: memoryview) -> None:
        """Make the calls and publish. Raises what `fail` makes of a call's exception, with nothing published, and
        NotInPlaceError if they can be repeated no more.

        `cancelled`: asked between two units; RunCancelledError if it says so. `doing`: the progress record. Blocks that
        it has taken then are to be given back by `PoolWriter.give_back_all`.
        """
        for block, _, _ in self._blocks:
            self._pool.take_again(block)
        made = 0
        try:
            for call, arguments in self._calls:
                if made:
                    if cancelled():
                        raise RunCancelledError("the run was cancelled between two units", reason="cancelled")
                    doing[STEP] = made
                call(arguments)
                made += 1
        except NotInPlaceError:
            raise
        except (Exception, SystemExit) as error:  # a provider may raise anything
            unit = self._units[made]
            fail(unit.nodes, unit.inputs, self._calls[made][1], error)
        if made > 1:
            doing[STEP] = 0
        base = run << 16
        words = self._words
        for index, number in self._outputs:
            words[index] = base | number
        if self._blocks:
            self._pool.published()
