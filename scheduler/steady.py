"""The steady state of the caller: a feed that looks like the last one goes to the same places under the same words.

`Signature` says whether a feed looks like one that was checked before: same names, dtypes and shapes, so it need not be
checked again. `SteadyRun` is what a slot's last run of a signature wrote, rang, waited for and read, with nothing left
to look up. Whatever does not fit (strings, sequences, another shape, results in the output pool) takes the general way
in `runner.py`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.scheduler.deploy import Generation
from outrider.scheduler.inplace import Array, Targets
from outrider.shm.board import STRONG_ORDER, TENSOR, number_of

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
    """Names, dtypes and shapes of a feed of plain arrays.

    Compared by identity: a session keeps its latest one for runs of all outputs, an IOBinding one for its own runs.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> None:
        self._values = tuple(values)

    @classmethod
    def of(cls, feeds: Mapping[str, Any]) -> Signature | None:
        """The signature of a checked feed; None if a value is not a plain array of numbers."""
        if not STRONG_ORDER or not all(_plain(value) for value in feeds.values()):
            return None
        return cls([(name, value.dtype, value.shape) for name, value in feeds.items()])

    def fits(self, feed: Any) -> bool:
        """True if `feed` is a dict with exactly these names, and arrays of exactly these dtypes and shapes."""
        if type(feed) is not dict or len(feed) != len(self._values):
            return False
        for name, dtype, shape in self._values:
            value = feed.get(name)
            if type(value) is not np.ndarray or value.shape != shape:
                return False
            given = value.dtype
            if given is not dtype and given != dtype:
                return False
        return True


def _plain(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype != object


class SteadyRun:
    """A slot's last run of one signature in one generation, ready to be repeated.

    It keeps no array of the caller's alive.
    """

    __slots__ = (
        "signature", "generation", "words", "copies", "nbytes", "complete", "returned_bytes", "_copies",
        "_copied", "_large", "_in_place", "_own", "_bells", "_lasts", "_results",
    )  # fmt: skip

    def __init__(
        self,
        signature: Signature,
        generation: Generation,
        slot: int,
        feeds: Mapping[str, Any],
        inputs: Mapping[str, Array | None],
        words: Sequence[tuple[int, int]],
    ) -> None:
        """`inputs`: fed name -> the place it is copied to, None for one that is read where it lies. `words`: (edge,
        layout number) in the order in which they are published.
        """
        board = generation.board
        self.signature = signature
        self.generation = generation
        self.words = words
        copied = {name: place for name, place in inputs.items() if place is not None}
        self.copies = len(copied)
        self.nbytes = sum(place.nbytes for place in copied.values())
        self._copied = tuple(copied.items())
        self._large = tuple(name for name, place in copied.items() if place.nbytes > LARGE)
        self._in_place = tuple((name, weakref.ref(feeds[name])) for name, place in inputs.items() if place is None)
        self._own = tuple((board.index(edge, slot), number) for edge, number in words)
        self._bells = tuple(bell.fileno() for bell in generation.first_bells)
        readers = {number: side.reader for number, side in generation.sides.items()}
        self._lasts = tuple((readers[b].words, readers[b].index(edge, slot)) for b, edge in generation.lasts)
        self._results: dict[str, tuple[memoryview, int, int, int, int, Array | None]] = {}
        self.complete = False
        """Whether `results` may be asked for: every output is copied from where it lay, or lies in its target."""
        self._copies: list[Array] = []  # what is copied to be returned
        self.returned_bytes = 0

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """True if a feed of this signature goes where the last one went."""
        for name, array in self._in_place:
            if array() is not feeds[name]:
                return False
        # A large one is worth a look: perhaps it need not be copied.
        return not self._large or all(self.generation.reach.find(feeds[name]) is None for name in self._large)

    def start(self, feeds: Mapping[str, Any], run: int) -> None:
        """Copy the feed, publish, ring."""
        for name, place in self._copied:
            place[...] = feeds[name]
        base, words = run << 16, self.generation.board.words
        for index, number in self._own:
            words[index] = base | number
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def ended(self, run: int) -> bool | None:
        """None while a last partition is not done with `run`; then whether one of them is void."""
        void = False
        for words, index in self._lasts:
            word = words[index]
            if word >> 16 != run:
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
        self.complete = list(self._results) == list(wanted)
        self._copies = [known[5] for known in self._results.values() if known[5] is not None]
        self.returned_bytes = sum(array.nbytes for array in self._copies)

    @property
    def returned_copies(self) -> int:
        """How many results are copied."""
        return len(self._copies)

    def results(self, run: int, targets: Targets | None) -> list[Array] | None:
        """All results, in order, copies or targets; None if one of them does not lie where it lay."""
        base = run << 16
        for words, index, number, at, version, _ in self._results.values():
            if words[index] != base | number or words[at] != version:
                return None
        if targets is None:
            return [array.copy() for array in self._copies]
        returned = []
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
