"""What binding a block from nothing (`walk.py`) and re-shaping a binding (`reshape.py`) share: one op at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from outrider.providers.contract import Place
from outrider.providers.cpu.arena import Region
from outrider.providers.cpu.binding import Binding, LateKernel, LateOp, Plan
from outrider.providers.cpu.blocks import ABSENT, Block, Code, Op
from outrider.providers.cpu.items import KNOWN, LATE, LATE_ITEM, Item, plain
from outrider.providers.cpu.kernels.copying import copier
from outrider.providers.cpu.kernels.frame import Dynamic
from outrider.providers.cpu.modes import BoundMode, OpMemory, immediate
from outrider.providers.cpu.records import FOLDED, UNBOUND, Misfit, Record
from outrider.providers.cpu.usage import out_of_memory, values
from outrider.providers.wire.dtypes import name_as
from outrider.providers.wire.failures import fail
from outrider.shm.errors import OutOfMemoryError


class Stage(NamedTuple):
    """A value that is copied into the memory of the block before each run: `name` for errors, dtype and shape."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


Given = Mapping[int, "Item | Stage"]  # the formals and free values of a block


class Builder:
    """A block being bound. `place`: for the outputs of a unit."""

    region: Region
    targets: dict[int, int]

    def __init__(self, code: Code, block: Block, threads: int, place: Place | None) -> None:
        self.code = code
        self.block = block
        self.threads = threads
        self.items: dict[int, Item] = {}
        self.placed: dict[int, np.ndarray] = {}
        self._place = place

    # What ops see of it ----------------------------------------------------------------------------------------------
    def item(self, number: int) -> Item:
        """The state of a value; constants are read when first asked for."""
        item = self.items.get(number)
        if item is None:
            item = self.items[number] = self.code.constant(number)
        return item

    def target(self, number: int) -> int | None:
        """The unit output that a value is, if any."""
        return self.targets.get(number)

    def place(self, i: int, declared: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """The place of unit output `i`, asked for once."""
        assert self._place is not None
        self.placed[i] = array = self._place(i, name_as(dtype, declared), shape)
        return array

    def keep(self, number: int) -> Item:
        """The value is read in the run by a late op: its memory is not given to others. Returns its state."""
        raise NotImplementedError

    def memory(self, before: Record | None) -> OpMemory:
        """Memory for one attempt to bind an op. `before`: its record in an earlier binding, if there is one."""
        raise NotImplementedError

    def inputs(self, op: Op) -> list[Item | None]:
        """The states of an op's inputs, None where one is omitted."""
        return [None if number == ABSENT else self.item(number) for number in op.inputs]

    # One op ----------------------------------------------------------------------------------------------------------
    def fold(self, op: Op, items: Sequence[Item | None]) -> Record:
        """Execute an op whose inputs are known; once per unit where they are the same for every signature."""
        shared = all(item is None or item.shared for item in items)
        results = self.code.folded.get(op) if shared else None
        if results is None:
            results = immediate(op, [None if item is None else item.value for item in items], self)
            for result in results:
                if isinstance(result, np.ndarray):
                    result.flags.writeable = False
            if shared:
                self.code.folded[op] = results
        makes = {n: Item(KNOWN, result, shared=shared) for n, result in zip(op.outputs, results, strict=True)}
        makes.pop(ABSENT, None)
        return Record(FOLDED, op, op.reads, makes)

    def bind(self, op: Op, items: Sequence[Item | None], before: Record | None) -> Record | None:
        """Bind an op whose inputs have fixed addresses; None when it has to be bound in the run after all."""
        assert op.kernel is not None
        # A kernel may find out that it is dynamic after it asked for an output. A place cannot be given back, so where
        # one will be asked for, a first attempt takes ordinary memory.
        attempts = (True,) if self.targets.keys().isdisjoint(op.outputs) else (False, True)
        for final in attempts:
            memory = self.memory(before)
            mode = BoundMode(self, op, items, memory, final)
            try:
                op.kernel.bind(mode, op.parsed)
            except (Dynamic, Misfit) as reason:
                memory.discard()
                if isinstance(reason, Misfit):
                    raise
                return None
            except Exception as cause:
                memory.discard()
                fail((op.origin,), op.step.inputs, mode.inputs, cause, op.fused)
            if final:
                return mode.record()
            memory.discard()
        raise AssertionError("the last attempt is final")

    def unbound(self, op: Op, before: Record | None) -> Record:
        """Put a node into the unbound stretch."""
        late: LateOp
        if op.kernel is None:
            from outrider.providers.cpu.control import late_control  # it binds bodies, so it needs this module

            late = late_control(op, self, None if before is None else before.late)
        else:
            late = LateKernel(op, [None if number == ABSENT else self.keep(number) for number in op.inputs])
        makes = {number: LATE_ITEM for number in op.outputs if number != ABSENT}
        return Record(UNBOUND, op, op.reads, makes, late=late)

    # All of it -------------------------------------------------------------------------------------------------------
    def binding(self, plan: Plan, records: Sequence[Record]) -> Binding:
        """What was built. Its memory is there, or OutOfMemoryError names the largest values in it."""
        ending = self._deliver()
        try:
            self.region.scratch.ensure(self.region.high, "the scratch memory of a program")
        except OutOfMemoryError as error:
            raise out_of_memory(error, self.region.high, values(self.code, records)) from None
        self.code.high = max(self.code.high, self.region.high)
        return Binding(self.code, self.block, self.threads, plan, self.items, records, self.placed, ending)

    def _deliver(self) -> list[Callable[[], Any]]:
        """Copies into the places of unit outputs that are no fresh results: views, constants, inputs, duplicates."""
        if self._place is None:
            return []
        copies: list[Callable[[], Any]] = []
        for i, number in enumerate(self.block.results):
            if number == ABSENT or i in self.placed:
                continue
            item = self.item(number)
            if item.state == LATE or not plain(item) or item.value is None:
                continue
            source = item.value
            target = self.place(i, self.code.outputs[i].dtype, source.shape, source.dtype)
            copies.append(copier(self.code.library, target, source))
        return copies
