"""The scratch memory of a worker: one sparse mapping from which programs take fixed addresses.

Programs of one worker run one at a time, so all of them start at offset 0 and only the highest mark counts. Pages are
touched when a program has been bound, after a check against what the machine has left; until then an address costs
nothing. A body of a control-flow node starts where the memory of the program around it ends.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError, RangesFullError
from outrider.shm.ranges import Ranges
from outrider.shm.segment import SEGMENT_BYTES, Segment, address_of, create_segment

ALIGN = 64
LARGE = 1 << 28  # bytes; single requests from here on are checked at once, before a plan is built around them


class Scratch:
    """The mapping. `mark` bytes from its start are populated."""

    def __init__(self) -> None:
        descriptor = create_segment("outrider-scratch")
        try:
            self._segment = Segment(descriptor, writable=True)
        finally:
            os.close(descriptor)
        self.base = address_of(np.ndarray((1,), np.uint8, buffer=self._segment.view))
        self.mark = 0

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """A writable C-contiguous array at a fixed address; its pages are there after `ensure`."""
        return self._segment.array(offset, dtype, shape)

    def contains(self, array: np.ndarray) -> bool:
        """True when the array's memory lies in this mapping."""
        return array.size > 0 and self.base <= address_of(array) < self.base + SEGMENT_BYTES

    def ensure(self, mark: int, value: str) -> None:
        """Touch the first `mark` bytes; raises OutOfMemoryError naming `value` before anything is touched."""
        if mark > self.mark:
            self._segment.populate(self.mark, mark - self.mark, value)
            self.mark = mark

    def trim(self, mark: int) -> None:
        """Give back what lies above `mark`."""
        page = os.sysconf("SC_PAGE_SIZE")
        keep = -(-mark // page) * page
        if keep < self.mark:
            self._segment.discard(keep, -(-(self.mark - keep) // page) * page)
            self.mark = keep


class Region:
    """The addresses of one program from `base` on: pieces are allocated and freed while it is bound.

    `high` is the mark that the scratch memory needs, `peak` the most bytes that were in use at once.
    """

    def __init__(self, scratch: Scratch, base: int = 0) -> None:
        self.scratch = scratch
        self.base = base
        base = -(-base // ALIGN) * ALIGN
        self.high = base
        self.peak = 0
        self._ranges = Ranges(base, SEGMENT_BYTES, ALIGN)

    def allocate(
        self, value: str, shape: tuple[int, ...], dtype: np.dtype[Any], room: int = 0
    ) -> tuple[np.ndarray, int, int]:
        """(array, offset, bytes taken); `room` bytes are left free behind the array.

        Raises OutOfMemoryError naming `value` when the size is out of the question.
        """
        nbytes = math.prod(shape) * dtype.itemsize + room
        if nbytes >= LARGE:
            memory.check(value, nbytes)
        taken = max(ALIGN, -(-nbytes // ALIGN) * ALIGN)
        try:
            offset = self._ranges.allocate(taken)
        except RangesFullError:
            raise OutOfMemoryError(
                f"{value} needs {nbytes} bytes, more than the scratch memory of a worker can address",
                value=value, asked=nbytes, available=memory.available_bytes(),
            ) from None  # fmt: skip
        self.high = max(self.high, offset + taken)
        self.peak = max(self.peak, self._ranges.in_use)
        return self.scratch.array(offset, dtype, shape), offset, taken

    def free(self, offset: int) -> None:
        """The piece at `offset` may be given to others."""
        self._ranges.free(offset)
