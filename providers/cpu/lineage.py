"""The bindings of one block, each made from the one before where it can be (`reshape.py`), else by a walk."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np

from outrider.providers.contract import Place
from outrider.providers.cpu.arena import Region, Scratch
from outrider.providers.cpu.binding import Binding
from outrider.providers.cpu.blocks import Block, Code
from outrider.providers.cpu.building import Given, Stage
from outrider.providers.cpu.growth import PRIMED, REBUILT, REPLAYED, Entry, Growth, Signature
from outrider.providers.cpu.items import FIXED
from outrider.providers.cpu.records import Misfit
from outrider.providers.cpu.reshape import reshape
from outrider.providers.cpu.walk import Walk
from outrider.shm.errors import OutOfMemoryError

MISFITS = 8  # in a row, after which re-shaping is not tried any more until the program is primed again

log = logging.getLogger("outrider.cpu")


class Lineage:
    """`counts`: bindings by how they were made; none where the code is not to be re-shaped: all are walks then."""

    def __init__(self, code: Code, block: Block, scratch: Scratch, threads: int) -> None:
        self.counts: Counter[str] = Counter()
        self._code, self._block = code, block
        self._scratch, self._threads = scratch, threads
        self._growth = Growth()
        self._last: Binding | None = None
        self._misfits = 0

    @property
    def last(self) -> Binding | None:
        """The latest binding, if there is one."""
        return self._last

    def bind(self, given: Given, base: int = 0, place: Place | None = None) -> Binding:
        """A binding for `given` whose memory starts at `base`; older ones stay valid.

        Raises KernelError naming the node that does not take its inputs, OutOfMemoryError.
        """
        if not self._code.reshape:
            self._last = self._walk(given, base, place, None)
            return self._last
        place = None if place is None else _Once(place)
        signature = _signature(given)
        action = self._growth.next(signature)
        binding = None
        if action == REPLAYED:
            binding = self._reshaped(given, base, place)
            if binding is None:
                action = REBUILT
        if binding is None and action == REBUILT:
            try:
                binding = self._walk(given, base, place, self._last)
            except OutOfMemoryError:  # perhaps without room to grow
                action = PRIMED
        if binding is None:
            binding = self._walk(given, base, place, None)
            self._misfits = 0
        self._growth.done(action, signature)
        self.counts[action] += 1
        self._last = binding
        return binding

    def _reshaped(self, given: Given, base: int, place: Place | None) -> Binding | None:
        last = self._last
        if last is None or last.region.base != base or self._misfits >= MISFITS:
            return None
        try:
            binding = reshape(last, given, place)
        except Misfit as reason:
            log.debug("a program is bound anew: %s", str(reason))
            self._misfits += 1
            return None
        self._misfits = 0
        return binding

    def _walk(self, given: Given, base: int, place: Place | None, earlier: Binding | None) -> Binding:
        region = Region(self._scratch, base)
        return Walk(self._code, self._block, region, given, place, self._threads, earlier).bound()


class _Once:
    """Places of outputs, asked for once each although a binding may take two attempts."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[tuple[int, str, tuple[int, ...]], np.ndarray] = {}

    def __call__(self, i: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        key = (i, dtype, shape)
        if key not in self._known:
            self._known[key] = self._place(i, dtype, shape)
        return self._known[key]


def _signature(given: Given) -> Signature:
    entries = []
    for number, item in given.items():
        if isinstance(item, Stage):
            entries.append(Entry(number, FIXED, item.dtype.str, item.shape))
        elif isinstance(item.value, np.ndarray):
            entries.append(Entry(number, item.state, item.value.dtype.str, item.value.shape))
        else:
            entries.append(Entry(number, item.state, "", None))
    return tuple(entries)
