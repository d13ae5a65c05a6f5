"""User memory: arrays of the caller's that workers can reach without a copy.

A `UserMemory` hands out ranges of a segment as arrays. There are two kinds. `process_memory()` is the calling process's
own: one segment, read-only for every worker that maps it, so inputs made there are read where they lie. And the upper
half of each worker's output pool, which that worker can write: results that are bound to arrays there are written where
the caller wants them.

An array is built on the segment's one memoryview, so whatever is derived from it (views, DLPack capsules, memoryviews)
keeps it alive. When it goes, a weak reference notes its range in a deque and does nothing else, for it may run in any
thread and within any lock; the range is used again by a later array, unless a fork of the process may still have the
first. While any array lives its `UserMemory` does too.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError, RangesFullError
from outrider.shm.ranges import Ranges
from outrider.shm.segment import ALIGN, Segment, create_segment

KEPT_BYTES = 64 << 20
"""Memory of ranges that nobody uses stays up to this many bytes, for arrays to come."""


class _Hold(weakref.ref[npt.NDArray[Any]]):
    """A weak reference to an array that knows its range."""

    __slots__ = ("memory", "offset", "kept")
    memory: UserMemory
    offset: int
    kept: bool  # a fork may have it


_holds: dict[int, _Hold] = {}  # those of the arrays that live: they keep their memory


def _dropped(hold: _Hold, holds: dict[int, _Hold] = _holds) -> None:
    del holds[id(hold)]
    if not hold.kept:
        hold.memory._returned.append(hold.offset)


class UserMemory:
    """Arrays for the caller in `[start, end)` of a writable segment. Called from any thread."""

    def __init__(self, segment: Segment, start: int = 0, end: int | None = None) -> None:
        self.segment = segment
        self._ranges = Ranges(start, segment.nbytes if end is None else end, ALIGN)
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()

    def empty(self, dtype: npt.DTypeLike, shape: tuple[int, ...], value: str) -> npt.NDArray[Any]:
        """A writable, C-contiguous array at a multiple of 64 bytes; its contents are whatever was there.

        Raises OutOfMemoryError, naming `value`, if memory is short, ValueError for a negative dimension.
        """
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for dim in shape:
            if dim < 0:
                raise ValueError(f"{value} cannot have the negative dimension {dim} (shape {list(shape)})")
            nbytes *= dim
        with self._lock:
            self._sweep()
            try:
                offset = self._ranges.allocate(nbytes)
            except RangesFullError as error:
                memory.check(value, nbytes)  # what the machine lacks is the better story
                raise OutOfMemoryError(
                    f"{value} needs {nbytes} bytes; the largest gap among the arrays of this process has "
                    f"{error.largest} bytes: drop some of them",
                    value=value,
                    asked=nbytes,
                    available=error.largest,
                ) from error
            try:
                self.segment.populate(offset, nbytes, value)
                array = self.segment.array(offset, dtype, shape)
            except BaseException:
                self._ranges.free(offset)
                raise
        hold = _Hold(array, _dropped)
        hold.memory, hold.offset, hold.kept = self, offset, False
        _holds[id(hold)] = hold
        return array

    def sweep(self) -> None:
        """Take back the ranges of arrays that are gone."""
        if self._returned:
            with self._lock:
                self._sweep()

    def in_use(self) -> int:
        """Bytes of the arrays that live, rounded up to 64 each."""
        self.sweep()
        return self._ranges.in_use

    def _sweep(self) -> None:
        while self._returned:
            offset = self._returned.popleft()
            size = self._ranges.size_of(offset)
            self._ranges.free(offset)
            if self.segment.populated_bytes() - self._ranges.in_use > KEPT_BYTES:
                self.segment.discard(offset, size)


class ProcessMemory(UserMemory):
    """The memory of this process that workers are shown. `descriptor`: of its segment, open while this lives."""

    def __init__(self) -> None:
        self.descriptor = create_segment("outrider-user")
        weakref.finalize(self, os.close, self.descriptor)
        super().__init__(Segment(self.descriptor, writable=True))


_latest: weakref.ref[ProcessMemory] | None = None
_lock = threading.Lock()


def process_memory() -> ProcessMemory:
    """The user memory of this process, made now if there is none: it lives as long as arrays or sessions need it.

    Raises OutOfMemoryError if the process has no addresses left for it.
    """
    global _latest
    with _lock:
        found = None if _latest is None else _latest()
        if found is None:
            found = ProcessMemory()
            _latest = weakref.ref(found)
        return found


def _keep_all() -> None:
    for hold in list(_holds.values()):
        hold.kept = True


def _forked() -> None:
    """A fork shares its parent's arrays, but must not take their ranges for free ones."""
    global _latest, _lock
    _latest, _lock = None, threading.Lock()


os.register_at_fork(before=_keep_all, after_in_child=_forked)
