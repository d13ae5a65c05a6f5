"""A generation: one plan on its workers, as the coordinator sees it: boards, segments, pools, doorbells.

It is made whole and dropped whole. A worker that dies in between has a successor, which maps the same segments and goes
on where the dead one stopped (`left`): values of runs in flight stay where they are, and nobody else notices.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from outrider.providers.wire import messages
from outrider.providers.wire.declared import Declarations
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.scheduler.inplace import Reach
from outrider.scheduler.numbering import Blueprint, Numbering
from outrider.scheduler.worker import Incarnation, Worker
from outrider.shm.board import OWN, VOID, BoardReader, BoardWriter, Layout, arena_start, number_of, run_of
from outrider.shm.doorbell import Doorbell
from outrider.shm.errors import LayoutError
from outrider.shm.leases import Leases, Taken
from outrider.shm.places import Places
from outrider.shm.ranges import largest_gap
from outrider.shm.segment import Segment
from outrider.shm.user import ProcessMemory, UserMemory


class Left(NamedTuple):
    """What a dead worker left: bytes `first` to `end` of its segment are free for new values, `keep` (offset, bytes)
    are values of runs in flight, `taken` are blocks of its pool that are not free."""

    first: int
    end: int
    keep: list[tuple[int, int]]
    taken: list[Taken]


@dataclass(frozen=True)
class RefusedUnit:
    """A unit that its worker did not compile: where it is in the plan, and which of its nodes are to blame.

    `nodes`: names; empty for all of them.
    """

    partition: int
    unit: int
    nodes: tuple[str, ...]
    reason: str
    traceback: str


@dataclass
class WorkerSide:
    """What the coordinator reads of one worker: its board, its output pool. `serving`: the incarnation that writes."""

    worker: Worker
    serving: Incarnation
    reader: BoardReader
    declared: Declarations  # of its edges
    pool: Segment
    leases: Leases
    arrays: UserMemory  # the caller's half of the pool


class Descriptors:
    """The segments of a generation, as long as a worker may have to be given them: `close` is idempotent."""

    def __init__(self) -> None:
        self.boards: dict[int, int] = {}
        self.pools: dict[int, int] = {}

    def close(self) -> None:
        for one in (self.boards, self.pools):
            while one:
                os.close(one.popitem()[1])


@dataclass
class Generation:
    """One loaded generation, ready for runs."""

    number: int
    blueprint: Blueprint
    numbering: Numbering
    plans: Sequence[messages.PartitionPlan]
    descriptors: Descriptors
    released: dict[int, int]  # board -> the first of the coordinator's words that count its released blocks
    board: BoardWriter
    places: Places
    sides: dict[int, WorkerSide]  # by board
    inputs: dict[str, int]  # model input -> edge of board 0
    targets: dict[str, int]  # model output that only the caller gets -> the edge of board 0 that says where it wants it
    user: ProcessMemory
    reach: Reach
    outputs: dict[str, tuple[int, int]]  # model output -> (board, edge)
    results: list[tuple[int, int]]  # every edge that may hold a block of an output pool
    dones: list[tuple[int, int]]  # (board, done edge) of each partition
    lasts: list[tuple[int, int]]  # those of the partitions nobody waits for
    first_bells: list[Doorbell]
    partition_nodes: list[list[str]]
    partitions_of: dict[int, set[int]]  # board -> its partitions
    leases: tuple[Leases, ...]  # of all output pools
    random: frozenset[int] = frozenset()  # partitions that do not give the same twice
    refused: list[RefusedUnit] = field(default_factory=list)
    spoilt: set[int] = field(default_factory=set)  # boards on which a worker wrote what cannot be
    righted: dict[int, int] = field(default_factory=dict)  # such a board -> the last run begun before it was set right

    def close(self) -> None:
        """No worker will be given its segments any more. Idempotent."""
        self.descriptors.close()

    def sweep(self) -> None:
        """Take back the memory of arrays that the caller has dropped."""
        self.user.sweep()
        for side in self.sides.values():
            side.arrays.sweep()

    def result(self, board: int, layout: Layout) -> np.ndarray[Any, Any]:
        """The array that a layout of a worker's board describes; its contents change with each run."""
        dtype = numpy_dtype(BY_NUMBER[layout.dtype])
        return self.sides[board].reader.memory_of(layout).array(layout.offset, dtype, layout.shape)

    # What workers have done -----------------------------------------------------------------------------------------
    def done(self, partition: int, slot: int) -> int:
        """The word that tells which run of a slot a partition has served last."""
        return self.word(*self.dones[partition], slot)

    def word(self, board: int, edge: int, slot: int) -> int:
        """What is published on an edge of a board, the coordinator's own included."""
        if board == 0:
            return self.board.words[self.board.index(edge, slot)]
        return self.sides[board].reader.word(edge, slot)

    def owed(self, board: int, slot: int, run: int) -> list[int]:
        """The partitions of a worker that have not served this run of a slot."""
        return [one for one in sorted(self.partitions_of[board]) if run_of(self.done(one, slot)) != run]

    def cancelled(self, slot: int, run: int) -> bool:
        """Whether this run of a slot was given up."""
        return run_of(self.board.words[self.board.index(messages.CANCEL, slot)]) == run

    def left(self, board: int, runs: Sequence[tuple[int, int]]) -> Left:
        """What the dead worker of a board left to its successor. `runs`: (slot, run) of those in flight."""
        side = self.sides[board]
        layouts: list[Layout] = []

        def published() -> Iterable[Layout]:
            layouts.extend(self._published(board, runs))
            return layouts

        taken = side.leases.taken(published)
        keep = [(one.offset, one.nbytes) for one in layouts if one.memory == OWN and one.nbytes]
        segment = side.reader.segment
        start = arena_start(self.numbering.edges[board], self.blueprint.slots)
        first, end = largest_gap(start, segment.nbytes, keep)
        return Left(first, end, keep, taken)

    def _published(self, board: int, runs: Sequence[tuple[int, int]]) -> Iterable[Layout]:
        reader = self.sides[board].reader
        dones = {edge for where, edge in self.dones if where == board}
        for edge in range(self.numbering.edges[board]):
            if edge in dones:
                continue
            for slot, run in runs:
                word = reader.word(edge, slot)
                if run_of(word) == run and number_of(word) != VOID:
                    try:
                        yield reader.layout(edge, slot, number_of(word))
                    except LayoutError:  # whoever reads it finds that too, and says whose it is
                        continue
