"""Where the values of one writer lie: one growable buffer per (edge, slot) in the writer's segment.

A buffer is allocated at first use, checked against the memory that is left, and kept. When a larger value comes it is
replaced by one of at least one and a half times its size; `epoch` then changes, and whoever bound code to places or
keeps layout numbers binds again. A slot has one run at a time, so nobody reads a buffer that is being replaced.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from outrider.shm import memory
from outrider.shm.board import ENCODED, NONE, TENSOR, BoardWriter, Layout, arena_start
from outrider.shm.errors import OutOfMemoryError, RangesFullError
from outrider.shm.ranges import Ranges
from outrider.shm.segment import Segment


class Places:
    """The buffers behind a `BoardWriter`'s edges. Called by the writer's one thread per slot; slots share the lock."""

    def __init__(self, segment: Segment, board: BoardWriter, edges: int, slots: int) -> None:
        self.segment = segment
        self.board = board
        self._moved = 0
        self._lock = threading.Lock()
        self._ranges = Ranges(arena_start(edges, slots), segment.nbytes)
        self._buffers: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def epoch(self) -> int:
        """Changes when a place moved or a layout number got a new meaning."""
        return self._moved + self.board.redefined

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers."""
        return self._ranges.in_use

    def reserve(self, nbytes: int, value: str) -> int:
        """Offset of a range that is no edge's, zero-filled and kept. Raises OutOfMemoryError naming `value`."""
        with self._lock:
            offset = self._ranges.allocate(nbytes)
        self.segment.populate(offset, nbytes, value)
        return offset

    def _offset(self, edge: int, slot: int, nbytes: int, value: str) -> int:
        held = self._buffers.get((edge, slot))
        if held is not None and held[1] >= nbytes:
            return held[0]
        capacity = nbytes if held is None else max(nbytes, held[1] + held[1] // 2)
        try:
            offset = self._ranges.allocate(max(capacity, 1))
        except RangesFullError as error:
            memory.check(value, nbytes)  # what the machine lacks is the better story
            left = self.segment.nbytes - self._ranges.in_use
            raise OutOfMemoryError(
                f"value {value!r} needs {nbytes:,} bytes, more than its segment has left ({left:,} bytes)",
                value=value,
                asked=nbytes,
                available=left,
            ) from error
        try:
            self.segment.populate(offset, capacity, value)
        except OutOfMemoryError:
            self._ranges.free(offset)
            raise
        if held is not None:
            self._ranges.free(held[0])
            self._moved += 1
        self._buffers[edge, slot] = (offset, capacity)
        return offset

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
        with self._lock:
            return self.board.number(edge, slot, Layout(NONE, 0, 0, (), 0, 0, None))
