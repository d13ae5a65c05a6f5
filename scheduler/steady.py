"""The steady state of the caller: a feed that looks like an earlier one goes to the same places under the same words.

`Signature` says whether a feed looks like one that was checked before: same names, dtypes and shapes, so it need not be
checked again. `SteadyRun` is what a slot's last run of a signature wrote, rang, waited for and read, with nothing left
to look up. Whatever does not fit (strings, sequences, a new shape, results in the output pool) takes the general way in
`runner.py`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.wire.messages import START
from outrider.scheduler.generation import Generation
from outrider.scheduler.inplace import Array, Targets
from outrider.shm.board import STRONG_ORDER, TENSOR, number_of

SIGNATURES = 16  # kept by a session, and as steady runs by each slot: as many as an edge has layouts
MISSES = 8  # runs whose results lay elsewhere, until a steady run is learned anew
SHARED_PLACES = 4  # steady runs of one signature, whose inputs are read at different places in turn
LARGE = 64 << 10  # bytes: to look up where an array of this size lies costs far less than to copy it


@dataclass
class Copies:
    """Runs of one slot, and copies made for them by the coordinator. Counted by whoever has the slot."""

    runs: int = 0
    copies: int = 0
    copied_bytes: int = 0

    def add(self, nbytes: int, copies: int = 1) -> None:
        """Count copies of `nbytes` in all."""
        self.copies += copies
        self.copied_bytes += nbytes


class Signature:
    """Names, dtypes and shapes of a feed of plain arrays, and the outputs asked for.

    Compared by identity: a session keeps its latest ones, an IOBinding one for its own runs. `asked` are the names that
    the caller gave, `wanted` the outputs to return; `again`: it has come before, so it is worth learning.
    """

    __slots__ = ("asked", "wanted", "again", "_values")

    def __init__(
        self,
        values: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]],
        asked: Sequence[str] | None,
        wanted: Sequence[str],
    ) -> None:
        self.asked = None if asked is None else tuple(asked)
        self.wanted = tuple(wanted)
        self.again = False
        self._values = tuple(values)

    @classmethod
    def of(
        cls, feeds: Mapping[str, Any], asked: Sequence[str] | None = None, wanted: Sequence[str] = ()
    ) -> Signature | None:
        """The signature of a checked feed; None if a value is not a plain array of numbers."""
        if not STRONG_ORDER or not all(_plain(value) for value in feeds.values()):
            return None
        return cls([(name, value.dtype, value.shape) for name, value in feeds.items()], asked, wanted)

    def fits(self, feed: Any, asked: Sequence[str] | None = None) -> bool:
        """True if `feed` is a dict with exactly these names, arrays of exactly these dtypes and shapes, and `asked`
        names the same outputs in a list or tuple."""
        if type(feed) is not dict or len(feed) != len(self._values):
            return False
        if asked is not self.asked and (type(asked) not in (list, tuple) or tuple(asked or ()) != self.asked):
            return False
        for name, dtype, shape in self._values:
            value = feed.get(name)
            if type(value) is not np.ndarray or value.shape != shape:
                return False
            given = value.dtype
            if given is not dtype and given != dtype:
                return False
        return True


class Signatures:
    """The latest signatures of a session's feeds. Used by any thread."""

    def __init__(self) -> None:
        self._latest: Signature | None = None
        self._known: dict[Any, Signature] = {}
        self._lock = threading.Lock()

    def find(self, feed: Any, asked: Sequence[str] | None) -> Signature | None:
        """The one that a feed fits."""
        latest = self._latest
        if latest is None or latest.fits(feed, asked):
            return latest
        found = self._known.get(self._key(feed, asked))
        if found is None or not found.fits(feed, asked):  # what was fed under this key may have had to be converted
            return None
        self._latest = found
        return found

    def add(self, signature: Signature, feed: Any, asked: Sequence[str] | None) -> None:
        """Keep the signature of a feed, in place of the oldest one."""
        key = self._key(feed, asked)
        if key is None:
            return
        with self._lock:
            self._latest = signature
            while len(self._known) >= SIGNATURES:
                self._known.pop(next(iter(self._known)))
            self._known[key] = signature

    @staticmethod
    def _key(feed: Any, asked: Sequence[str] | None) -> Any:
        if type(feed) is not dict or not all(_plain(value) for value in feed.values()):
            return None
        if asked is not None and (type(asked) not in (list, tuple) or not all(type(name) is str for name in asked)):
            return None
        values = tuple([(name, value.dtype, value.shape) for name, value in feed.items()])
        return values, None if asked is None else tuple(asked)


def _plain(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype != object


class SteadyRun:
    """A slot's last run of one signature in one generation, ready to be repeated.

    It keeps no array of the caller's alive.
    """

    __slots__ = (
        "generation", "words", "copies", "nbytes", "complete", "misses", "returned_bytes", "returned_copies", "_copied",
        "_defaults", "_large", "_in_place", "_own", "_bells", "_lasts", "_results", "_slot", "_as_of",
        "_stamps", "_records", "_others", "_unwanted",
    )  # fmt: skip

    def __init__(
        self,
        generation: Generation,
        slot: int,
        feeds: Mapping[str, Any],
        inputs: Mapping[str, Array | None],
        defaults: Sequence[tuple[Array, Array]],
        words: Sequence[tuple[int, int]],
    ) -> None:
        """`inputs`: fed name -> the place it is copied to, None for one that is read where it lies. `defaults`: (place,
        value) of inputs that were not fed. `words`: (edge, layout number) in the order in which they are published.
        """
        board, places = generation.board, generation.places
        self.generation = generation
        self._slot = slot
        self._as_of = places.changes[slot]
        edges = [generation.inputs[name] for name, place in inputs.items() if place is not None]
        indices = [places.stamp_index(edge, slot) for edge in edges]
        self._stamps = tuple((index, places.stamps[index]) for index in indices)
        self._records = tuple(board.version_at(edge, slot, number) for edge, number in words if edge != START)
        self._defaults = tuple(defaults)
        self.words = words
        copied = {name: place for name, place in inputs.items() if place is not None}
        self.copies = len(copied)
        self.nbytes = sum(place.nbytes for place in copied.values())
        self._copied = tuple(copied.items())
        self._large = tuple(name for name, place in copied.items() if place.nbytes > LARGE)
        self._in_place = [
            (name, weakref.ref(feeds[name]), generation.reach.find(feeds[name]))
            for name, place in inputs.items()
            if place is None
        ]
        self._others: tuple[SteadyRun, ...] = ()  # of the same signature, with inputs in other places
        self._own = tuple((board.index(edge, slot), number) for edge, number in words)
        self._bells = tuple(bell.fileno() for bell in generation.first_bells)
        readers = {number: side.reader for number, side in generation.sides.items()}
        self._lasts = tuple((readers[b].words, readers[b].index(edge, slot)) for b, edge in generation.lasts)
        self._results: dict[str, tuple[memoryview, int, int, int, int, Array | None]] = {}
        self._unwanted: list[tuple[memoryview, int, int, int, int]] = []
        self.complete = False
        """Whether `results` may be asked for: every output is copied from where it lay, or lies in its target."""
        self.misses = 0
        """Runs whose results did not lie where `results` looks for them: those of a new worker never do."""
        self.returned_copies = self.returned_bytes = 0

    def follow(self, before: SteadyRun | None) -> None:
        """Take over what was kept for this signature before."""
        if before is not None and before.generation is self.generation and before._in_place:
            self._others = (before, *before._others)[: SHARED_PLACES - 1]
            before._others = ()

    def fitting(self, generation: Generation, feeds: Mapping[str, Any]) -> SteadyRun | None:
        """What can be repeated for a feed of this signature, if anything."""
        if self.generation is not generation:
            return None
        if self.fits(feeds):
            return self
        for other in self._others:
            if other.fits(feeds):
                return other
        return None

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """True if a feed of this signature goes where the last one went."""
        if self.generation.places.changes[self._slot] != self._as_of and not self._intact():
            return False
        for position, (name, array, place) in enumerate(self._in_place):
            given = feeds[name]
            if array() is not given:
                if self.generation.reach.find(given) != place:
                    return False
                self._in_place[position] = (name, weakref.ref(given), place)
        # A large one is worth a look: perhaps it need not be copied.
        return not self._large or all(self.generation.reach.find(feeds[name]) is None for name in self._large)

    def _intact(self) -> bool:
        """Something of the slot has changed: whether nothing of this run did."""
        places, words = self.generation.places, self.generation.board.words
        if any(places.stamps[index] != stamp for index, stamp in self._stamps):
            return False
        if any(words[at] != version for at, version in self._records):
            return False
        self._as_of = places.changes[self._slot]
        return True

    def start(self, feeds: Mapping[str, Any], run: int, again: bool) -> None:
        """Copy the feed, publish, ring. `again`: it was the slot's last run too, so defaults are where they were."""
        if not again:
            for place, default in self._defaults:
                place[...] = default
        for name, place in self._copied:
            place[...] = feeds[name]
        base, words = run << 16, self.generation.board.words
        for index, number in self._own:
            words[index] = base | number
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def ended(self, run: int) -> bool | None:
        """None while a last partition is not done with `run`; then whether one of them is void.

        A word of a later run, which nobody has begun, counts as one of this: `results` does not find what it looks for.
        """
        void = False
        for words, index in self._lasts:
            word = words[index]
            if word >> 16 < run:
                return None
            void = void or not word & 0xFFFF
        return void

    def learn(self, slot: int, wanted: Sequence[str], targets: Targets | None) -> None:
        """Remember where the results of the run that has just ended lie, those that are copied or in their targets.

        `wanted` and `targets` are those of every run of this signature.
        """
        outputs, reach = self.generation.outputs, self.generation.reach
        for name in dict.fromkeys(wanted):
            if name not in outputs:
                continue
            board, edge = outputs[name]
            reader = self.generation.sides[board].reader
            number = number_of(reader.word(edge, slot))
            layout = reader.layout(edge, slot, number)
            if layout.kind == TENSOR and layout.block is None:
                target = None if targets is None else targets.arrays.get(name)
                in_place = target is not None and reach.find(target) == (layout.memory, layout.offset)
                array = None if in_place else self.generation.result(board, layout)
                at, version = reader.version_at(edge, slot, number)
                self._results[name] = (reader.words, reader.index(edge, slot), number, at, version, array)
        # A result that nobody asked for may come in a block of the output pool, which is to be given back. Its size may
        # be known in the run only, so it is watched.
        pooled = False
        for name, (board, edge) in outputs.items():
            if name not in wanted:
                reader = self.generation.sides[board].reader
                number = number_of(reader.word(edge, slot))
                pooled = reader.layout(edge, slot, number).block is not None or pooled
                at, version = reader.version_at(edge, slot, number)
                self._unwanted.append((reader.words, reader.index(edge, slot), number, at, version))
        self.complete = list(self._results) == list(wanted) and not pooled
        copied = [known[5] for known in self._results.values() if known[5] is not None]
        self.returned_copies, self.returned_bytes = len(copied), sum(array.nbytes for array in copied)

    def results(self, run: int, targets: Targets | None) -> list[Array] | None:
        """All results, in order, copies or targets; None if one of them does not lie where it lay."""
        base = run << 16
        for words, index, number, at, version in self._unwanted:
            if words[index] != base | number or words[at] != version:
                return None
        returned: list[Array] = []
        for words, index, number, at, version, array in self._results.values():
            if words[index] != base | number or words[at] != version:
                return None
            if targets is None and array is not None:
                returned.append(array.copy())
        if targets is None:
            return returned
        for name, known in self._results.items():
            target, array = targets.arrays.get(name), known[5]
            if target is None:
                assert array is not None
                target = array.copy()
            elif array is not None:
                np.copyto(target, array)
            returned.append(target)
        return returned

    def holds(self, name: str, run: int) -> bool:
        """True if a result lies where it lay."""
        known = self._results.get(name)
        if known is None:
            return False
        words, index, number, at, version, _ = known
        return words[index] == run << 16 | number and words[at] == version

    def result(self, name: str, target: Array | None, counters: Copies) -> Array:
        """A result that `holds`: a copy, or its target with the result in it."""
        array = self._results[name][5]
        if array is None:
            assert target is not None
            return target
        counters.add(array.nbytes)
        if target is None:
            return array.copy()
        np.copyto(target, array)
        return target
