"""Free lists over byte ranges, without any memory behind them.

`Ranges` hands out aligned, disjoint ranges of `[start, end)`, best fit first, and joins neighbours again when they are
freed. `Intervals` is a set of bytes kept as sorted, disjoint, non-adjacent half-open intervals.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from outrider.shm.errors import RangesFullError

PAGE = mmap.PAGESIZE


class Ranges:
    """Allocator over `[start, end)`: offsets and sizes are multiples of `align` (a power of two)."""

    def __init__(self, start: int, end: int, align: int = 64) -> None:
        if align <= 0 or align & (align - 1):
            raise ValueError(f"align must be a power of two, got {align}")
        self.align = align
        self._free = Intervals()
        self._sizes: dict[int, int] = {}
        self.in_use = 0
        """Bytes handed out now, rounded up to `align` each."""
        start = -(-start // align) * align
        end = end // align * align
        if end > start:
            self._free.add(start, end)

    def allocate(self, nbytes: int) -> int:
        """Offset of a free range of `nbytes` (at least one aligned unit), from the smallest gap that holds it.

        Raises RangesFullError if no gap does.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = max(1, -(-nbytes // self.align)) * self.align
        best = largest = -1
        gap = 0
        for start, end in self._free:
            length = end - start
            largest = max(largest, length)
            if length >= size and (best < 0 or length < gap):
                best, gap = start, length
                if gap == size:
                    break
        if best < 0:
            raise RangesFullError(
                f"no gap of {size} bytes is left; the largest has {max(largest, 0)}",
                asked=size,
                largest=max(largest, 0),
            )
        self._free.remove(best, best + size)
        self._sizes[best] = size
        self.in_use += size
        return best

    def reserve(self, offset: int, nbytes: int) -> None:
        """Hand out this range and no other. Raises RangesFullError if it is not free."""
        size = max(1, -(-nbytes // self.align)) * self.align
        if offset % self.align or not self._free.covers(offset, offset + size):
            raise RangesFullError(f"bytes {offset} to {offset + size} are not free", asked=size, largest=0)
        self._free.remove(offset, offset + size)
        self._sizes[offset] = size
        self.in_use += size

    def free(self, offset: int) -> None:
        """Give back a range by the offset `allocate` returned. Raises ValueError if it is not in use."""
        size = self._sizes.pop(offset, None)
        if size is None:
            raise ValueError(f"offset {offset} is not in use")
        self._free.add(offset, offset + size)
        self.in_use -= size

    def size_of(self, offset: int) -> int:
        """Bytes of the range in use at `offset`. Raises KeyError if there is none."""
        return self._sizes[offset]


def largest_gap(first: int, end: int, taken: Iterable[tuple[int, int]], align: int = PAGE) -> tuple[int, int]:
    """The largest part of `[first, end)` in which none of `taken` (offset, bytes) lies, as whole units of `align`."""
    best = (first, first)
    for offset, nbytes in [*sorted(taken), (end, 0)]:
        start, stop = -(-first // align) * align, min(offset, end) // align * align
        if stop - start > best[1] - best[0]:
            best = start, stop
        first = max(first, offset + nbytes)
    return best


class Intervals:
    """A set of integers as sorted, disjoint, non-adjacent half-open intervals."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def total(self) -> int:
        """How many integers are in the set."""
        return sum(self._ends) - sum(self._starts)

    def covers(self, start: int, end: int) -> bool:
        """True if all of `[start, end)` is in the set."""
        at = bisect_right(self._starts, start) - 1
        return start >= end or (at >= 0 and self._ends[at] >= end)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of `[start, end)` that are not in the set, in order."""
        gaps = []
        for at in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[at] >= end:
                break
            if self._starts[at] > start:
                gaps.append((start, self._starts[at]))
            start = self._ends[at]
        if start < end:
            gaps.append((start, end))
        return gaps

    def add(self, start: int, end: int) -> None:
        """Put `[start, end)` in."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Take `[start, end)` out."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        starts: list[int] = []
        ends: list[int] = []
        if self._starts[first] < start:
            starts.append(self._starts[first])
            ends.append(start)
        if self._ends[last - 1] > end:
            starts.append(end)
            ends.append(self._ends[last - 1])
        self._starts[first:last] = starts
        self._ends[first:last] = ends
