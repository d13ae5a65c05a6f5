"""The board: what one writer says about its edges, at the start of its segment.

Every word is 64 bits, native byte order, and has one writer: the segment's. Bytes from 0:

    header   8 words   magic, generation, edges, slots, 4 unused
    done     edges x slots words, `[edge][slot]`: run << 16 | layout number
    records  LAYOUTS_PER_EDGE x edges x slots records of 32 words, `[number - 1][edge][slot]`, from the next multiple of
             256: version, kind, dtype number, item size, offset, nbytes, memory << 32 | block + 1, rank, 24 dimensions
    arena    from the next page: the places of values

Order of writes: header once, magic last. A record: version 0, the fields, then a version that this board has not used
before. `done` last of all: whoever reads run and number there finds record and bytes complete. Runs count from 1 (48
bits), so a fresh board announces nothing; layout number 0 is *void*, a value that failed to come.

`memory` says what `offset` is an offset in: 0 is this segment, any other number a memory that writer and readers agreed
on. `block + 1` is 0 for all but blocks of an output pool.

A record belongs to one slot of one edge, and a slot holds one run at a time: a number is redefined only for a later run
of the same slot, so no reader of the present run looks at it.

A writer that died may have a successor, which goes on with what is there. It redefines the number that a `done` word
names last of all, as readers may still look at it, and its versions begin above those of all before it.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.shm.errors import LayoutError
from outrider.shm.segment import ALIGN, Segment, page_up

TENSOR = 1
"""Kind: elements of one dtype, C-contiguous."""
ENCODED = 2
"""Kind: bytes whose meaning the reader knows (strings, sequences, maps)."""
NONE = 3
"""Kind: no value (an empty optional)."""

VOID = 0
"""The layout number of a value that failed to come."""
LAYOUTS_PER_EDGE = 16
"""How many layouts each slot of an edge remembers; numbers are 1 to this."""
MAX_RANK = 24

OWN = 0
"""The memory that is the writer's own segment."""

_MAGIC = 0x52_45_44_49_52_54_55_4F  # "OUTRIDER"
_HEADER = 8
_RECORD = 32
_FIELDS = 8
_DIM_LIMIT = 1 << 62
_POPULATE = 1 << 16  # bytes of records that get memory together: asking costs more than the pages

# x86 keeps the order of stores and of loads; elsewhere a lock taken and released stands between data and word.
STRONG_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
_fence_lock = threading.Lock()


def fence() -> None:
    """Loads and stores before it happen before those after it; needed only without STRONG_ORDER."""
    with _fence_lock:
        pass


def word(run: int, number: int) -> int:
    """The `done` word of a run and a layout number."""
    return run << 16 | number


def run_of(word: int) -> int:
    """The run in a `done` word; 0 before the first."""
    return word >> 16


def number_of(word: int) -> int:
    """The layout number in a `done` word; VOID for a value that failed to come."""
    return word & 0xFFFF


def arena_start(edges: int, slots: int) -> int:
    """First byte behind the board, page-aligned."""
    return page_up((_records_at(edges, slots) + LAYOUTS_PER_EDGE * edges * slots * _RECORD) * 8)


def _records_at(edges: int, slots: int) -> int:
    """Index of the first word of the first record."""
    return -(-(_HEADER + edges * slots) // _RECORD) * _RECORD


@dataclass(frozen=True)
class Layout:
    """Where a value lies and what it is: `nbytes` at `offset` of `memory`, a number (OWN: of its writer's segment).

    `dtype` is a number that the users of the board agree on, `itemsize` the bytes of one element. `block` is the block
    of an output pool, None for any other place. NONE has neither bytes nor shape.
    """

    kind: int
    dtype: int
    itemsize: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    block: int | None = None
    memory: int = OWN


class BoardWriter:
    """The writing side of a board. Raises OutOfMemoryError if there is no memory for it.

    `successor`: 0 for the first writer of the board, a larger number for each that goes on after the one before died.
    """

    def __init__(self, segment: Segment, edges: int, slots: int, generation: int, successor: int = 0) -> None:
        self._segment = segment
        self._words = self.words = segment.words
        self._slots = slots
        self._pairs = edges * slots
        self._records = _records_at(edges, slots)
        self._arena = arena_start(edges, slots)
        segment.populate(0, (_HEADER + self._pairs) * 8, "board")
        self._successor = successor
        self._version = successor << 40
        self._known: list[dict[Layout | int, int] | None] = [None] * self._pairs
        self.changes = [0] * slots
        """Per slot, how often a number got a new meaning: whoever keeps numbers looks them up again when it changed."""
        words = self._words
        words[1], words[2], words[3] = generation, edges, slots
        if not STRONG_ORDER:
            fence()
        words[0] = _MAGIC

    def number(self, edge: int, slot: int, layout: Layout) -> int:
        """The number of a layout on this slot of an edge, defined now if it is new.

        With all numbers taken the one least recently asked for is redefined: call this only between the start of the
        slot's run and its `publish`.
        """
        pair = edge * self._slots + slot
        known = self._known[pair]
        if known is None:
            known = self._known[pair] = self._left(pair)
        try:
            number = known.pop(layout, None)
            if number is None:
                # Dicts keep the order of insertion, and every use inserts anew: the first is the least recently used.
                full = len(known) == LAYOUTS_PER_EDGE
                number = known.pop(next(iter(known))) if full else len(known) + 1
                self._define(pair, number, layout)
            known[layout] = number
        except BaseException:  # the number may be lost, and the next one be that of a live layout
            self._known[pair] = None
            raise
        return number

    def index(self, edge: int, slot: int) -> int:
        """Where the `done` word is in `words`, for those who write it themselves (only with STRONG_ORDER)."""
        return _HEADER + edge * self._slots + slot

    def version_at(self, edge: int, slot: int, number: int) -> tuple[int, int]:
        """Where the version of a layout's record is in `words`, and what it is: it changes with the layout."""
        at = self._records + ((number - 1) * self._pairs + edge * self._slots + slot) * _RECORD
        return at, self._words[at]

    def publish(self, edge: int, slot: int, run: int, number: int) -> None:
        """Announce that the value of `run` is complete. Ring the consumers' doorbells after it."""
        if not STRONG_ORDER:
            fence()
        self._words[8 + edge * self._slots + slot] = run << 16 | number

    def void(self, edge: int, slot: int, run: int) -> None:
        """Announce that the value of `run` will not come."""
        self._words[8 + edge * self._slots + slot] = run << 16

    def _left(self, pair: int) -> dict[Layout | int, int]:
        """The numbers of a pair before it has layouts of this writer: an earlier one's, to be redefined in turn."""
        if not self._successor:
            return {}
        published = number_of(self._words[_HEADER + pair])
        numbers = range(1, LAYOUTS_PER_EDGE + 1)
        others = [number for number in numbers if number != published]
        return {number: number for number in ([*others, published] if published in numbers else others)}

    def _define(self, pair: int, number: int, layout: Layout) -> None:
        rank = len(layout.shape)
        if rank > MAX_RANK:
            raise LayoutError(f"a value of rank {rank} cannot cross processes; the limit is {MAX_RANK}", what="rank")
        at = self._records + ((number - 1) * self._pairs + pair) * _RECORD
        start = at * 8 // _POPULATE * _POPULATE
        self._segment.populate(start, min(_POPULATE, self._arena - start), "board")
        words = self._words
        if words[at]:
            self.changes[pair % self._slots] += 1
        words[at] = 0
        words[at + 1] = layout.kind
        words[at + 2] = layout.dtype
        words[at + 3] = layout.itemsize
        words[at + 4] = layout.offset
        words[at + 5] = layout.nbytes
        words[at + 6] = layout.memory << 32 | (0 if layout.block is None else layout.block + 1)
        words[at + 7] = rank
        for axis in range(rank):
            words[at + _FIELDS + axis] = layout.shape[axis]
        if not STRONG_ORDER:
            fence()
        self._version += 1
        words[at] = self._version


class BoardReader:
    """The reading side of a board: raw words, and layouts that are checked before anyone builds an array on them.

    It may be made before the writer has written its header. `memories`: what this reader has mapped of the memories
    that layouts may name beside the writer's segment, by number. `misfit` says why a layout that is well-formed in
    itself is none of its edge's, '' if it is one: it is asked once per record.
    """

    def __init__(
        self,
        segment: Segment,
        edges: int,
        slots: int,
        generation: int,
        memories: Mapping[int, Segment] | None = None,
        misfit: Callable[[int, Layout], str] | None = None,
    ) -> None:
        self.segment = segment
        self._misfit = misfit
        self._memories = dict(memories or {})
        self._words = self.words = segment.words
        self._slots = slots
        self._pairs = edges * slots
        self._records = _records_at(edges, slots)
        self._header = (_MAGIC, generation, edges, slots)
        self._arena = arena_start(edges, slots)
        self._layouts: dict[int, tuple[int, Layout]] = {}

    def word(self, edge: int, slot: int) -> int:
        """The `done` word: see `run_of` and `number_of`."""
        value = self._words[8 + edge * self._slots + slot]
        if not STRONG_ORDER:
            fence()
        return value

    def index(self, edge: int, slot: int) -> int:
        """Where the `done` word is in `words`, for those who read it themselves; see `fence`."""
        return _HEADER + edge * self._slots + slot

    def version_at(self, edge: int, slot: int, number: int) -> tuple[int, int]:
        """Where the version of a layout's record is in `words`, and what it is: it changes with the layout."""
        at = self._records + ((number - 1) * self._pairs + edge * self._slots + slot) * _RECORD
        return at, self._words[at]

    def layout(self, edge: int, slot: int, number: int) -> Layout:
        """The layout behind a number that `word` gave. Raises LayoutError if its record is malformed."""
        at = self._records + ((number - 1) * self._pairs + edge * self._slots + slot) * _RECORD
        found = self._layouts.get(at)
        if found is not None and found[0] == self._words[at]:
            return found[1]
        if not 1 <= number <= LAYOUTS_PER_EDGE:
            raise self._malformed(edge, slot, number, f"layout numbers are 1 to {LAYOUTS_PER_EDGE}")
        header = tuple(self._words[:4])
        if header != self._header:
            raise self._malformed(edge, slot, number, f"the board's header is {header}, expected {self._header}")
        version = self._words[at]
        layout = self._checked(edge, slot, number, self._words[at + 1 : at + _RECORD].tolist())
        if version == 0 or self._words[at] != version:
            raise self._malformed(edge, slot, number, "its record is not complete")
        reason = self._misfit(edge, layout) if self._misfit is not None else ""
        if reason:
            raise self._malformed(edge, slot, number, reason, layout.offset, layout.nbytes)
        self._layouts[at] = (version, layout)
        return layout

    def memory_of(self, layout: Layout) -> Segment:
        """The segment that a layout's `offset` is in."""
        return self.segment if layout.memory == OWN else self._memories[layout.memory]

    def _checked(self, edge: int, slot: int, number: int, record: list[int]) -> Layout:
        kind, dtype, itemsize, offset, nbytes, where, rank = record[:7]
        memory, block = where >> 32, where & 0xFFFFFFFF
        if kind not in (TENSOR, ENCODED, NONE):
            raise self._malformed(edge, slot, number, f"kind {kind} is unknown")
        if rank > MAX_RANK:
            raise self._malformed(edge, slot, number, f"rank {rank} is above {MAX_RANK}")
        shape = tuple(record[7 : 7 + rank])
        expected = itemsize
        for dim in shape:
            expected *= dim
            if dim >= _DIM_LIMIT:
                raise self._malformed(edge, slot, number, f"dimension {dim} is above {_DIM_LIMIT}")
        if kind == NONE:
            if offset or nbytes or where or rank:
                raise self._malformed(edge, slot, number, "no value has no place", offset, nbytes)
            return Layout(NONE, dtype, itemsize, (), 0, 0)
        if kind == TENSOR and (itemsize == 0 or expected != nbytes):
            raise self._malformed(
                edge, slot, number, f"shape {shape} of {itemsize}-byte items is not {nbytes} bytes", offset, nbytes
            )
        if offset % ALIGN:
            raise self._malformed(edge, slot, number, f"offset {offset} is not a multiple of {ALIGN}", offset, nbytes)
        if memory == OWN:
            if block:
                raise self._malformed(edge, slot, number, "a block lies in no output pool", offset, nbytes)
            first, limit = self._arena, self.segment.nbytes
        else:
            if memory not in self._memories:
                raise self._malformed(edge, slot, number, f"its memory {memory} is not mapped here", offset, nbytes)
            first, limit = 0, self._memories[memory].nbytes
        if offset < first or offset + nbytes > limit:
            raise self._malformed(
                edge,
                slot,
                number,
                f"bytes {offset} to {offset + nbytes} are outside {first} to {limit}",
                offset,
                nbytes,
            )
        return Layout(kind, dtype, itemsize, shape, offset, nbytes, block - 1 if block else None, memory)

    def _malformed(
        self, edge: int, slot: int, number: int, reason: str, offset: int | None = None, nbytes: int | None = None
    ) -> LayoutError:
        return LayoutError(
            f"layout {number} of edge {edge}, slot {slot} is malformed: {reason}",
            what=f"edge {edge}",
            offset=offset,
            nbytes=nbytes,
            limit=self.segment.nbytes,
        )
