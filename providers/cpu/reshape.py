"""A binding made from an earlier one of the same block, for other extents or other addresses.

Only ops that see a difference are bound again: an input whose contents, where known, or whose address, dtype or shape
are others than before. They get the memory that they had; what they make is compared with what they made, so that a
difference goes no further than it must. The order of the ops and who reads what do not change, so the memory plan of
the earlier binding holds as long as each value stays in the root that it was in, each root is large enough, and
nothing else is written over than was before. Where that is not so, `Misfit` says that the block must be walked again.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from outrider.providers.contract import Place
from outrider.providers.cpu.arena import Region
from outrider.providers.cpu.binding import Binding
from outrider.providers.cpu.building import Builder, Given, Stage
from outrider.providers.cpu.conditions import branch_of
from outrider.providers.cpu.items import FIXED, Item, Root, alike
from outrider.providers.cpu.modes import check
from outrider.providers.cpu.records import ALIAS, BOUND, CHOSEN, FOLDED, STAGED, STRETCH, UNBOUND, Misfit, Record, Taken


def reshape(earlier: Binding, given: Given, place: Place | None = None) -> Binding:
    """The binding of the same block for `given`, whose states, dtypes and ranks are those of `earlier`.

    Raises Misfit, and KernelError naming the node that does not take its inputs.
    """
    with np.errstate(all="ignore"):
        return _Reshaping(earlier, place).bound(given)


class _Reshaping(Builder):
    def __init__(self, earlier: Binding, place: Place | None) -> None:
        super().__init__(earlier.code, earlier.block, earlier.threads, place)
        self.region = earlier.region
        self.targets = dict(earlier.plan.targets)
        self.items = dict(earlier.items)
        self._plan = earlier.plan
        self._records = list(earlier.records)
        self._pending = list(earlier.plan.always)

    def bound(self, given: Given) -> Binding:
        heapify(self._pending)
        self._stage(given)
        for number, item in given.items():
            if isinstance(item, Item):
                self._put(number, item)
        done = -1
        while self._pending:
            at = heappop(self._pending)
            if at != done:  # it may have been noted several times
                done = at
                self._redo(at)
        return self.binding(self._plan, self._records)

    def keep(self, number: int) -> Item:
        return self.item(number)

    def memory(self, before: Record | None) -> Recorded:
        assert before is not None
        return Recorded(self.region, before)

    def _stage(self, given: Given) -> None:
        stages = {number: item for number, item in given.items() if isinstance(item, Stage)}
        if not stages:
            return
        memory = self.memory(self._records[0])
        staged = {n: Item(FIXED, memory.take(s.name, s.shape, s.dtype)[0]) for n, s in stages.items()}
        for number, item in staged.items():
            self._put(number, item)
        self._records[0] = Record(STAGED, None, (), staged, taken=tuple(memory.taken))

    def _redo(self, at: int) -> None:
        self._records[at] = record = self._again(self._records[at])
        for number, item in record.makes.items():
            self._put(number, item)

    def _again(self, before: Record) -> Record:
        """The record of the op for what its inputs are now."""
        op = before.op
        if before.kind == STRETCH:
            from outrider.providers.cpu.stretch import again  # it binds blocks, so it needs this module

            return again(self, before)
        assert op is not None
        if op.kernel is None and before.kind == BOUND:
            raise Misfit(f"{op.origin.name} chooses among bodies")
        if before.kind == FOLDED:
            return self.fold(op, self.inputs(op))
        if before.kind == UNBOUND:
            return self.unbound(op, before)
        if before.kind == ALIAS:
            return before._replace(makes={number: self.item(before.reads[0]) for number in before.makes})
        if before.kind == CHOSEN:
            if branch_of(op, self.item(before.reads[0]).value) is not before.branch:
                raise Misfit(f"{op.origin.name} takes the other branch now")
            return before
        record = self.bind(op, self.inputs(op), before)
        if record is None:
            raise Misfit(f"{op.origin.name} is bound in the run now")
        return record

    def _put(self, number: int, item: Item) -> None:
        """The new state of a value; whoever reads it is bound again if it can tell the difference."""
        before = self.items[number]
        if item.state != before.state:
            raise Misfit(f"{self.code.names[number]} was {before.state} and is {item.state}")
        if item.root is not None and item.root is not before.root:
            raise Misfit(f"{self.code.names[number]} lies in other memory than before")
        if alike(item, before):
            return
        self.items[number] = item
        for at in self._plan.readers.get(number, ()):
            heappush(self._pending, at)


class Recorded:
    """The memory that an op had in an earlier binding, in the order of its requests."""

    def __init__(self, region: Region, before: Record) -> None:
        self.taken: list[Taken] = []
        self._region = region
        self._before = before

    def take(self, value: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[np.ndarray, Root]:
        asked = kind.itemsize
        for dim in shape:
            asked *= dim
        at = len(self.taken)
        if at == len(self._before.taken):
            raise Misfit(f"{value} had no memory before")
        root, before, change = self._before.taken[at]
        if asked > root.end - root.start:
            raise Misfit(f"{value} needs {asked} bytes and had room for {root.end - root.start}")
        self.taken.append(Taken(root, asked, max(change, abs(asked - before))))
        return self._region.scratch.array(root.offset, kind, shape), root

    def spare(self, value: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
        check(value, shape, kind)
        return np.empty(shape, kind)

    def dies(self, call: int, root: Root, reads: int) -> bool:
        reused = self._before.reused
        return call < len(reused) and reused[call] is root

    def discard(self) -> None:
        self.taken.clear()
