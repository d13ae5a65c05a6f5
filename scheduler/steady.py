"""The steady state of the caller: a feed that looks like the last one goes to the same places under the same words.

`Signature` says whether a feed looks like one that was checked before: same names, dtypes and shapes, so it need not be
checked again. `SteadyRun` is what a slot's last run of a signature wrote, rang, waited for and read, with nothing left
to look up. Whatever does not fit (strings, sequences, another shape, results in the output pool) takes the general way
in `runner.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outrider.scheduler.deploy import START, Generation
from outrider.shm.board import STRONG_ORDER, TENSOR, number_of


class Signature:
    """Names, dtypes and shapes of a feed of plain arrays. Compared by identity: a session keeps its latest one."""

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
    """A slot's last run of one signature in one generation, ready to be repeated."""

    __slots__ = (
        "signature", "generation", "words", "copies", "nbytes", "complete", "returned_bytes",
        "_inputs", "_own", "_bells", "_lasts", "_results",
    )  # fmt: skip

    def __init__(
        self,
        signature: Signature,
        generation: Generation,
        slot: int,
        inputs: Mapping[str, np.ndarray[Any, Any]],
        words: Sequence[tuple[int, int]],
    ) -> None:
        """`inputs`: fed name -> its place; `words`: (edge, layout number) of each input, defaults included."""
        board = generation.board
        self.signature = signature
        self.generation = generation
        self.words = words
        self.copies = len(inputs)
        self.nbytes = sum(place.nbytes for place in inputs.values())
        self._inputs = tuple(inputs.items())
        self._own = tuple((board.index(edge, slot), number) for edge, number in [(START, 1), *words])
        self._bells = tuple(bell.fileno() for bell in generation.first_bells)
        readers = {number: side.reader for number, side in generation.sides.items()}
        self._lasts = tuple((readers[b].words, readers[b].index(edge, slot)) for b, edge in generation.lasts)
        self._results: dict[str, tuple[memoryview, int, int, int, int, np.ndarray[Any, Any]]] = {}
        self.complete = False
        """Whether `results` may be asked for: every output of the model is copied from where it lay."""
        self.returned_bytes = 0

    def start(self, feeds: Mapping[str, Any], run: int) -> None:
        """Copy the feed, publish, ring."""
        for name, place in self._inputs:
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

    def learn(self, slot: int, wanted: Sequence[str]) -> None:
        """Remember where the results of the run that has just ended lie, those that are copied; `wanted` is all."""
        outputs = self.generation.outputs
        for name in dict.fromkeys(wanted):
            if name not in outputs:
                continue
            board, edge = outputs[name]
            reader = self.generation.sides[board].reader
            number = number_of(reader.word(edge, slot))
            layout = reader.layout(edge, slot, number)
            if layout.kind == TENSOR and layout.block is None:
                array = self.generation.result(board, layout)
                at, version = reader.version_at(edge, slot, number)
                self._results[name] = (reader.words, reader.index(edge, slot), number, at, version, array)
        self.complete = list(self._results) == list(wanted)
        self.returned_bytes = sum(known[-1].nbytes for known in self._results.values())

    def results(self, run: int) -> list[np.ndarray[Any, Any]] | None:
        """Copies of all results, in order; None if one of them does not lie where it lay."""
        copies = []
        base = run << 16
        for words, index, number, at, version, array in self._results.values():
            if words[index] != base | number or words[at] != version:
                return None
            copies.append(array.copy())
        return copies

    def result(self, name: str, run: int) -> np.ndarray[Any, Any] | None:
        """A copy of a result that lies where it lay; None if it does not."""
        known = self._results.get(name)
        if known is None:
            return None
        words, index, number, at, version, array = known
        if words[index] != run << 16 | number or words[at] != version:
            return None
        return array.copy()
