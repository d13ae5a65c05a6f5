"""Where the values of one writer lie: buffers in its segment, one set per run slot, and which edge uses which.

    segment   | board | buffer: has memory | only addresses | buffer: has memory | only addresses | ...
                      ^ offset             ^ + capacity     ^ + room

Edges that are never needed at the same time may share a buffer; who plans that sees to it that nobody needs the old
value when the next one is placed. A buffer gets memory at first use, checked against what is left, and keeps it. For a
larger value it takes more of its room, at least half as much again, and what lies or is bound there stays good. Only
beyond its room it moves: its stamp then changes, and whoever bound code to places in it binds again, nobody else. A
slot has one run at a time, so nobody reads a buffer that moves.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.shm import memory
from outrider.shm.board import ENCODED, NONE, TENSOR, BoardWriter, Layout, arena_start
from outrider.shm.errors import OutOfMemoryError, RangesFullError
from outrider.shm.ranges import Ranges
from outrider.shm.segment import PAGE, Segment, page_up

MANY_BUFFERS = 4096  # with more of them small values lie close together; else each buffer has pages of its own
DISCARD_BYTES = 1 << 20  # memory of a buffer of this size is returned when it has moved; less is kept for others


@dataclass
class _Buffer:
    offset: int
    capacity: int  # bytes with memory
    room: int  # bytes of addresses


class Places:
    """The buffers behind a `BoardWriter`'s edges. Called by the writer's one thread per slot; slots share the lock.

    `buffers`: edge -> number of its buffer, counted from 0; None for one per edge. `region`: the bytes of the segment
    that may be used, (first, end); None for all behind the board. `stamps` and `changes` are for those
    who keep places: `stamps[self.stamp_index(edge, slot)]` changes when the edge's buffer moves, `changes[slot]` when
    any buffer of the slot moves or a layout number gets a new meaning.
    """

    def __init__(
        self,
        segment: Segment,
        board: BoardWriter,
        edges: int,
        slots: int,
        buffers: Mapping[int, int] | None = None,
        region: tuple[int, int] | None = None,
    ) -> None:
        self.segment = segment
        self.board = board
        self.changes = board.changes
        self._slots = slots
        self._buffer_of = dict(enumerate(range(edges))) if buffers is None else dict(buffers)
        count = 1 + max(self._buffer_of.values(), default=-1)
        self.stamps = [0] * (count * slots)
        start, end = (arena_start(edges, slots), segment.nbytes) if region is None else region
        self._close = count * slots > MANY_BUFFERS
        # A quarter of the addresses for all buffers as they are first made: the rest is for those that move.
        self._share = (end - start) // (4 * max(count, 1) * slots) // PAGE * PAGE
        self._end = end
        self._lock = threading.Lock()
        self._ranges = Ranges(start, end)
        self._buffers: dict[int, _Buffer] = {}  # by stamp index
        self._largest: dict[tuple[int, int], int] = {}  # (edge, slot) -> bytes of its largest value
        self._reserved = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory of all buffers."""
        with self._lock:
            return self._reserved + sum(buffer.capacity for buffer in self._buffers.values())

    @property
    def unshared_bytes(self) -> int:
        """What the largest value of every edge in every slot would take in a buffer of its own."""
        with self._lock:
            return self._reserved + sum(self._largest.values())

    def stamp_index(self, edge: int, slot: int) -> int:
        """Where the stamp of the edge's buffer is in `stamps`. Raises KeyError for an edge without a buffer."""
        return self._buffer_of[edge] * self._slots + slot

    def reserve(self, nbytes: int, value: str) -> int:
        """Offset of a range that is no edge's, zero-filled and kept. Raises OutOfMemoryError naming `value`."""
        with self._lock:
            offset = self._ranges.allocate(nbytes)
            self._reserved += nbytes
        self.segment.populate(offset, nbytes, value)
        return offset

    def number(self, edge: int, slot: int, layout: Layout) -> int:
        """`BoardWriter.number`, for slots used by several threads."""
        with self._lock:
            return self.board.number(edge, slot, layout)

    def offset(self, edge: int, slot: int, nbytes: int, value: str) -> int:
        """Where `nbytes` of the edge's next value go. Raises OutOfMemoryError naming `value`."""
        with self._lock:
            return self._offset(edge, slot, nbytes, value)

    def tensor(
        self, edge: int, slot: int, code: int, dtype: np.dtype[Any], shape: tuple[int, ...], value: str
    ) -> tuple[np.ndarray, int]:
        """The writable C-contiguous array for a tensor, and the layout number to publish it under.

        `code` is the dtype number that readers get. Raises OutOfMemoryError naming `value`.
        """
        nbytes = dtype.itemsize
        for dim in shape:
            nbytes *= dim
        with self._lock:
            offset = self._offset(edge, slot, nbytes, value)
            number = self.board.number(edge, slot, Layout(TENSOR, code, dtype.itemsize, shape, offset, nbytes, None))
        return self.segment.array(offset, dtype, shape), number

    def elsewhere(
        self, edge: int, slot: int, code: int, dtype: np.dtype[Any], shape: tuple[int, ...], memory: int, offset: int
    ) -> int:
        """The layout number for a tensor that lies at `offset` of another memory than the writer's segment."""
        nbytes = dtype.itemsize
        for dim in shape:
            nbytes *= dim
        layout = Layout(TENSOR, code, dtype.itemsize, shape, offset, nbytes, None, memory)
        with self._lock:
            return self.board.number(edge, slot, layout)

    def blob(self, edge: int, slot: int, nbytes: int, value: str) -> tuple[memoryview, int]:
        """The writable bytes for an encoded value, and its layout number."""
        with self._lock:
            offset = self._offset(edge, slot, nbytes, value)
            number = self.board.number(edge, slot, Layout(ENCODED, 0, 1, (), offset, nbytes, None))
        return self.segment.view[offset : offset + nbytes], number

    def nothing(self, edge: int, slot: int) -> int:
        """The layout number of 'no value'."""
        return self.number(edge, slot, Layout(NONE, 0, 0, (), 0, 0, None))

    def _offset(self, edge: int, slot: int, nbytes: int, value: str) -> int:
        if nbytes > self._largest.get((edge, slot), 0):
            self._largest[edge, slot] = self._rounded(nbytes)
        index = self.stamp_index(edge, slot)
        held = self._buffers.get(index)
        if held is None:
            self._buffers[index] = held = self._new(nbytes, value)
        elif nbytes > held.capacity:
            wanted = max(nbytes, held.capacity + held.capacity // 2)
            if nbytes <= held.room:
                capacity = min(wanted, held.room)
                self.segment.populate(held.offset, capacity, value)
                held.capacity = capacity
            else:
                self._buffers[index] = self._new(wanted, value)
                self.stamps[index] += 1
                self.changes[slot] += 1
                self._ranges.free(held.offset)
                if held.capacity >= DISCARD_BYTES:
                    self.segment.discard(held.offset, held.capacity)
                held = self._buffers[index]
        return held.offset

    def _rounded(self, nbytes: int) -> int:
        """Bytes of memory for a value: whole pages, but for small values among many."""
        return page_up(max(nbytes, 1)) if nbytes >= PAGE or not self._close else max(nbytes, 1)

    def _new(self, nbytes: int, value: str) -> _Buffer:
        """A buffer with memory for `nbytes`, and with room if it has pages of its own."""
        capacity = self._rounded(nbytes)
        room = max(capacity, self._share) if capacity >= PAGE else capacity
        try:
            offset = self._ranges.allocate(room)
        except RangesFullError:
            room = capacity
            offset = self._exactly(room, value)
        try:
            self.segment.populate(offset, capacity, value)
        except OutOfMemoryError:
            self._ranges.free(offset)
            raise
        return _Buffer(offset, capacity, room)

    def _exactly(self, nbytes: int, value: str) -> int:
        try:
            return self._ranges.allocate(nbytes)
        except RangesFullError as error:
            memory.check(value, nbytes)  # what the machine lacks is the better story
            left = self._end - self._ranges.in_use
            raise OutOfMemoryError(
                f"value {value!r} needs {nbytes:,} bytes, more than its segment has left ({left:,} bytes)",
                value=value,
                asked=nbytes,
                available=left,
            ) from error
