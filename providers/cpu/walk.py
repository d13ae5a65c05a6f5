"""Binding a block from nothing: every op in order, every value given its state (`items.py`) and its memory.

Memory comes from a Region. A root is one allocated piece; views share it, and it is free again after the last reader of
all of them. An op may write over a dying input (`reuse`) if it is the only reader left of the root. Where an earlier
binding shows that a request for memory changes its size, it gets room to grow.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from outrider.providers.contract import Place
from outrider.providers.cpu.arena import Region
from outrider.providers.cpu.binding import Binding, LateAlias, LateOp, Plan
from outrider.providers.cpu.blocks import ABSENT, Block, Code, Op
from outrider.providers.cpu.building import Builder, Given, Stage
from outrider.providers.cpu.conditions import branch_of
from outrider.providers.cpu.growth import room
from outrider.providers.cpu.items import FIXED, KNOWN, LATE, LATE_ITEM, Item, Root, plain
from outrider.providers.cpu.records import ALIAS, BOUND, CHOSEN, STAGED, STRETCH, UNBOUND, Record, Taken

_FOREVER = 1 << 60


class Walk(Builder):
    """`given`: the formals and free values; `earlier`: a binding of the same block to learn from, if there is one."""

    def __init__(
        self,
        code: Code,
        block: Block,
        region: Region,
        given: Given,
        place: Place | None = None,
        threads: int = 1,
        earlier: Binding | None = None,
    ) -> None:
        super().__init__(code, block, threads, place)
        self.region = region
        self.targets = {}
        if place is not None:
            for i, number in enumerate(block.results):
                if number in block.produced:
                    self.targets.setdefault(number, i)
        self._uses: Counter[int] = Counter(block.uses)
        self._records: list[Record] = []
        self._before: dict[Op | None, Record] = {}
        self._stretch: LateOp | None = None
        if earlier is not None:
            kinds = (BOUND, UNBOUND, STAGED)
            self._before = {record.op: record for record in earlier.records if record.kind in kinds}
            self._stretch = next((record.late for record in earlier.records if record.kind == STRETCH), None)
        self._given = given

    def bound(self) -> Binding:
        """Walk, and return the binding. Raises KernelError naming the node that does not take its inputs."""
        with np.errstate(all="ignore"):
            self._stage()
            self._walk(self.block)
            if all(item.state != LATE for item in self._given.values() if isinstance(item, Item)):
                from outrider.providers.cpu.stretch import gathered  # it binds blocks, so it needs this module

                self._records = gathered(self, self._records, self._stretch)
            return self.binding(Plan(self.region, self.targets, self._records), self._records)

    # What the ops need -----------------------------------------------------------------------------------------------
    def keep(self, number: int) -> Item:
        item = self.item(number)
        if item.root is not None:
            item.root.readers += _FOREVER
        return item

    def memory(self, before: Record | None) -> Planned:
        return Planned(self.region, before)

    # Walking ---------------------------------------------------------------------------------------------------------
    def _stage(self) -> None:
        memory = self.memory(self._before.get(None))
        staged: dict[int, Item] = {}
        for number, item in self._given.items():
            if isinstance(item, Stage):
                item = staged[number] = Item(FIXED, memory.take(item.name, item.shape, item.dtype)[0])
            self.items[number] = item
        if staged:
            self._records.append(Record(STAGED, None, (), staged, taken=tuple(memory.taken)))

    def _walk(self, block: Block) -> None:
        for op in block.ops:
            if op.kernel is None:
                self._control(op)
            else:
                self._kernel(op)

    def _control(self, op: Op) -> None:
        condition = self.item(op.inputs[0]) if op.step.op_type == "If" else LATE_ITEM
        if condition.state == KNOWN:
            self._inline(op, branch_of(op, condition.value))
        else:
            # A bound If is not re-shaped, so where shapes are known to change it stays in the stretch.
            record = self._if(op) if condition.state == FIXED and not self._before else None
            self._add(op, record or self.unbound(op, self._before.get(op)))

    def _if(self, op: Op) -> Record | None:
        """The record of an If as a bound step, if it can be one."""
        from outrider.providers.cpu.control import bound_if  # it binds bodies, so it needs this module

        memory = self.memory(None)
        record = bound_if(op, self, memory)
        if record is None:
            memory.discard()
        return record

    def _inline(self, op: Op, branch: Block) -> None:
        """Walk the branch of an If whose condition is known as if it stood here."""
        self._records.append(Record(CHOSEN, op, (op.inputs[0],), {}, branch=branch))
        for number in branch.produced:
            self._uses[number] += branch.uses[number]
        for number in branch.free:
            self._add_readers(number, branch.uses[number])
        pairs = [(out, inner) for out, inner in zip(op.outputs, branch.results, strict=True) if out != ABSENT]
        for out, inner in pairs:
            if out in self.targets and inner in branch.produced:
                self.targets.setdefault(inner, self.targets[out])
        self._walk(branch)
        for out, inner in pairs:
            self.items[out] = item = self.item(inner)
            self._add_readers(out, self._uses[out])
            late = LateAlias(op, inner, out) if item.state == LATE else None
            self._records.append(Record(ALIAS, op, (inner,), {out: item}, late=late))
        for number in (*branch.results, *op.captures, *op.inputs):
            self._release(number)

    def _kernel(self, op: Op) -> None:
        assert op.kernel is not None
        items = self.inputs(op)
        given = [item for item in items if item is not None]
        record: Record | None = None
        if op.deterministic and all(item.state == KNOWN for item in given):
            record = self.fold(op, items)
        elif all(plain(item) for item in given):
            record = self.bind(op, items, self._before.get(op))
        self._add(op, record or self.unbound(op, None))

    def _add(self, op: Op, record: Record) -> None:
        """The op is bound: its outputs get their states, and what nobody reads any more is free."""
        self._records.append(record)
        for number, item in record.makes.items():
            self.items[number] = item
            self._add_readers(number, self._uses[number])
        if record.kind == BOUND:
            for number in op.inputs:
                self._release(number)
            for taken in record.taken:
                self.free_if_dead(taken.root)

    def _add_readers(self, number: int, count: int) -> None:
        root = self.item(number).root
        if root is not None:
            root.readers += count

    def _release(self, number: int) -> None:
        root = None if number == ABSENT else self.item(number).root
        if root is not None:
            root.readers -= 1
            self.free_if_dead(root)

    def free_if_dead(self, root: Root) -> None:
        """Give a root that nobody will read back to the region."""
        if root.readers == 0:
            root.readers = -_FOREVER
            self.region.free(root.offset)


class Planned:
    """Memory from a region. `before`: what the same op took in an earlier binding."""

    def __init__(self, region: Region, before: Record | None) -> None:
        self.taken: list[Taken] = []
        self._region = region
        self._before = () if before is None else before.taken
        self._marks = region.high, region.peak

    def take(self, value: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[np.ndarray, Root]:
        asked, change = kind.itemsize, 0
        for dim in shape:
            asked *= dim
        if len(self.taken) < len(self._before):
            earlier = self._before[len(self.taken)]
            change = max(earlier.change, abs(asked - earlier.asked))
        array, offset, nbytes = self._region.allocate(value, shape, kind, room(asked, change))
        root = Root(offset, self._region.scratch.base + offset, nbytes)
        self.taken.append(Taken(root, asked, change))
        return array, root

    def spare(self, value: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
        return self.take(value, shape, kind)[0]

    def dies(self, call: int, root: Root, reads: int) -> bool:
        return root.readers == reads

    def discard(self) -> None:
        for taken in self.taken:
            self._region.free(taken.root.offset)
        self.taken.clear()
        self._region.high, self._region.peak = self._marks
