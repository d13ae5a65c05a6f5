"""Leases: large results that the caller owns without a copy.

A worker writes its results into blocks of its *output pool*, a segment that it and the coordinator map writable: blocks
lie in the lower half, arrays that the caller makes there (`user.py`) in the upper one. Each block has two counters. The
worker counts, for itself, how often it took the block; the coordinator counts in `released[block]`, one word each in
its own segment, how often it is done with it. Equal counters mean a free block, so no lock and no message is needed to
give one back. When a worker has died, its successor gets the blocks that are not free (`Leases.taken`) and goes on.

The caller's array is built directly on the pool's memoryview, so that whatever is derived from it (views, DLPack
capsules, memoryviews) keeps it alive; when it goes, a weak reference notes the block in a deque and does nothing else,
for it may run in any thread and within any lock.

A fork of the caller's process has the same arrays over the same memory. Their blocks are not given back any more: the
parent cannot see when its child drops them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt

from outrider.shm.board import Layout
from outrider.shm.errors import LayoutError, RangesFullError
from outrider.shm.ranges import Ranges
from outrider.shm.segment import PAGE, Segment, page_up

Taken = tuple[int, int, int, int]  # of a pool: block, offset, bytes, the `released` counter at which it is free


def callers_half(pool: Segment) -> int:
    """Where the half of an output pool begins that is the caller's: arrays to which results are bound lie there."""
    return page_up(pool.nbytes // 2)


class PoolWriter:
    """The worker's side: hands out blocks of `segment` (writable) to write results into.

    `coordinator_words` are the words of the coordinator's segment, of which `released` begins at index `base`; block
    numbers are 0 to `blocks - 1`. The pool holds at most `limit` bytes of memory, all of its half if None. `memory` is
    the number under which layouts name the pool. `taken`: what an earlier worker left there, of `Leases.taken`.
    """

    def __init__(
        self,
        segment: Segment,
        coordinator_words: memoryview,
        base: int,
        blocks: int,
        limit: int | None = None,
        *,
        memory: int,
        taken: Sequence[Taken] = (),
    ) -> None:
        self.segment = segment
        self.memory = memory
        self._words = coordinator_words
        self._base = base
        end = callers_half(segment)
        self._limit = end if limit is None else min(limit, end)
        self._ranges = Ranges(0, end, PAGE)
        self._leased: list[int] = coordinator_words[base : base + blocks].tolist()
        self._offsets: dict[int, int] = {}
        for block, offset, nbytes, free_at in taken:
            self._ranges.reserve(offset, page_up(max(nbytes, 1)))
            self._leased[block] = free_at
            self._offsets[block] = offset
        self._spare = [block for block in range(blocks - 1, -1, -1) if block not in self._offsets]
        self._open: list[int] = []  # taken, and neither published nor given back

    def take(self, nbytes: int, value: str = "result") -> tuple[int, int] | None:
        """A block of at least `nbytes`, as (block, offset in the pool), or None if none is free and none may be added.

        The smallest free block of up to twice the size is used again, so the same results find the same places. Each
        block that was taken must be published (`published`) or given back. Raises OutOfMemoryError, naming `value`, if
        memory is short.
        """
        size = page_up(max(nbytes, 1))
        best = -1
        best_size = 2 * size + 1
        for block, offset in self._offsets.items():
            if self._is_free(block):
                have = self._ranges.size_of(offset)
                if size <= have < best_size:
                    best, best_size = block, have
        if best < 0:
            best = self._add(size, value)
            if best < 0:
                return None
        self.take_again(best)
        return best, self._offsets[best]

    def is_free(self, block: int, offset: int, nbytes: int) -> bool:
        """True if the block still has room for `nbytes` at `offset` and nobody holds it."""
        # A block that was dropped may have come back under its number at its old place, and smaller.
        return (
            self._offsets.get(block) == offset
            and self._words[self._base + block] == self._leased[block]
            and self._ranges.size_of(offset) >= nbytes
        )

    def take_again(self, block: int) -> None:
        """Take a block that `is_free` has just said is free."""
        self._leased[block] += 1
        self._open.append(block)

    def give_back(self, block: int) -> None:
        """Undo a `take` whose block will not be published."""
        self._open.remove(block)
        self._leased[block] -= 1

    def published(self) -> None:
        """All that was taken is the coordinator's now."""
        self._open.clear()

    def give_back_all(self) -> None:
        """Undo every `take` since the last `published`: the run failed."""
        for block in self._open:
            self._leased[block] -= 1
        self._open.clear()

    def pooled_bytes(self) -> int:
        """Bytes of all blocks, free ones included."""
        return self._ranges.in_use

    def _is_free(self, block: int) -> bool:
        return bool(self._words[self._base + block] == self._leased[block])

    def _add(self, size: int, value: str) -> int:
        """A new block of `size` bytes, at the cost of free ones if need be; -1 if there is no room."""
        kept = sum(self._ranges.size_of(at) for block, at in self._offsets.items() if not self._is_free(block))
        if kept + size > self._limit:
            return -1
        offset = -1
        while True:
            if self._spare and self._ranges.in_use + size <= self._limit:
                try:
                    offset = self._ranges.allocate(size)
                    break
                except RangesFullError:
                    pass  # split up by blocks in use: dropping a free neighbour may join gaps
            if not self._drop_one():
                return -1
        try:
            self.segment.populate(offset, size, value)
        except BaseException:
            self._ranges.free(offset)
            raise
        block = self._spare.pop()
        self._offsets[block] = offset
        return block

    def _drop_one(self) -> bool:
        """Give the memory of one free block back; False if there is none."""
        for block, offset in self._offsets.items():
            if self._is_free(block):
                self.segment.discard(offset, self._ranges.size_of(offset))
                self._ranges.free(offset)
                del self._offsets[block]
                self._spare.append(block)
                return True
        return False


class _Lease(weakref.ref[npt.NDArray[Any]]):
    """A weak reference that knows its block, and which bytes of that its array covers."""

    __slots__ = ("block", "offset", "nbytes", "kept")
    block: int
    offset: int
    nbytes: int
    kept: bool  # a fork may have it


class Leases:
    """The coordinator's side: arrays over blocks of one worker's pool, and the words that give blocks back.

    `pool` is the worker's pool, mapped writable; `words` those of the coordinator's own segment, of which `released`
    begins at index `base`, populated, with `blocks` words. Arrays stay valid after this object is dropped.
    """

    def __init__(self, pool: Segment, words: memoryview, base: int, blocks: int) -> None:
        self._pool = pool
        self._words = words
        self._base = base
        self._blocks = blocks
        self._held: dict[int, _Lease] = {}
        self._lock = threading.Lock()  # a block is held, or counted as released
        self._dropped: deque[_Lease] = deque()
        _all[id(self)] = self
        # Bound once: a callback that held this object would keep pool and words alive with every result.
        self._on_drop = self._dropped.append

    def lease(self, layout: Layout, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The result at `layout` as a writable array of `dtype`; its block comes back after the array is gone.

        Raises LayoutError if the layout names no block, or one that is still the caller's.
        """
        block = layout.block
        if block is None or block >= self._blocks:
            raise LayoutError(f"a result lies in block {block} of a pool of {self._blocks}", what="block")
        self.sweep()
        if block in self._held:
            raise LayoutError(f"a result lies in block {block}, which is part of an earlier result", what="block")
        array = self._pool.array(layout.offset, dtype, layout.shape)
        lease = _Lease(array, self._on_drop)
        lease.block, lease.offset, lease.nbytes, lease.kept = block, layout.offset, layout.nbytes, False
        self._held[block] = lease
        return array

    def sweep(self) -> int:
        """Give back the blocks of all arrays that are gone; returns how many. Called from any thread, at any time."""
        count = 0
        while self._dropped:
            try:
                lease = self._dropped.popleft()
            except IndexError:  # another thread took it
                break
            if lease.kept:
                continue
            with self._lock:
                del self._held[lease.block]
                self._words[self._base + lease.block] += 1
            count += 1
        return count

    def release_now(self, block: int) -> None:
        """Give back a block that was published and copied, or is not wanted.

        Raises LayoutError if there is no such block or an array over it is the caller's.
        """
        if not 0 <= block < self._blocks or block in self._held:
            raise LayoutError(f"block {block} of {self._blocks} is not to be released", what="block")
        self._words[self._base + block] += 1

    def taken(self, published: Callable[[], Iterable[Layout]]) -> list[Taken]:
        """The blocks that a new worker must leave alone: the caller's, and those of layouts that it may still read.

        `published` lists the latter; other threads may go on to lease and release meanwhile.
        """
        found: dict[int, Taken] = {}
        with self._lock:
            # In this order: what is released from now on is released for the new worker too.
            counters = self._words[self._base : self._base + self._blocks].tolist()
            read = [layout for layout in published() if layout.block is not None and layout.block < self._blocks]
            places = [(layout.block or 0, layout.offset, layout.nbytes) for layout in read]
            places += [(block, lease.offset, lease.nbytes) for block, lease in list(self._held.items())]
        for block, offset, nbytes in places:
            found[block] = (block, offset, nbytes, counters[block] + 1)
        return list(found.values())

    def keep(self) -> None:
        """Never give back what is held now."""
        for lease in list(self._held.values()):
            lease.kept = True

    def held(self) -> int:
        """How many results are the caller's now, or a fork's."""
        self.sweep()
        return len(self._held)


_all: weakref.WeakValueDictionary[int, Leases] = weakref.WeakValueDictionary()


def _keep_all() -> None:
    for one in _all.valuerefs():  # a copy: other threads go on
        leases = one()
        if leases is not None:
            leases.keep()


os.register_at_fork(before=_keep_all)
