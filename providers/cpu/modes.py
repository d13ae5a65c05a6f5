"""The two modes of the kernel frame inside a program: bound (addresses now, work later) and immediate (all now)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from outrider.providers.cpu.arena import LARGE, Region
from outrider.providers.cpu.blocks import ABSENT, Code, Op
from outrider.providers.cpu.items import FIXED, KNOWN, Item, Root
from outrider.providers.cpu.kernels.frame import Bind, Dynamic, order_of, ordered
from outrider.providers.cpu.records import BOUND, Record, Taken
from outrider.providers.wire.failures import fail
from outrider.shm import memory
from outrider.shm.segment import address_of, extent_of

VARIANTS = 8  # of one packed weight that are kept, where what is made depends on shapes


class Surroundings(Protocol):
    """What a node sees of the binding around it."""

    code: Code
    threads: int

    def item(self, number: int) -> Item:
        """The state of a value."""


class Binder(Surroundings, Protocol):
    """What binds a block: it knows which outputs of ops are those of the unit."""

    region: Region

    def target(self, number: int) -> int | None:
        """The unit output that a value is, if any."""

    def place(self, i: int, declared: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """The place of unit output `i`."""


class OpMemory(Protocol):
    """Memory for one op that is being bound. `taken`: the requests so far."""

    taken: list[Taken]

    def take(self, value: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[np.ndarray, Root]:
        """A C-contiguous array at a fixed address, and what it lies in."""

    def spare(self, value: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
        """An array for an attempt that is discarded."""

    def dies(self, call: int, root: Root, reads: int) -> bool:
        """True if only this op reads `root` from here on, in `reads` of its inputs; asked in `call` of `reuse`."""

    def discard(self) -> None:
        """The attempt is forgotten."""


class BoundMode(Bind):
    """The frame's bound mode: addresses are fixed now, steps are recorded."""

    def __init__(self, binder: Binder, op: Op, items: Sequence[Item | None], memory: OpMemory, final: bool) -> None:
        values = [None if item is None else item.value for item in items]
        super().__init__(op.step, values, binder.threads, binder.code.library, binder.code.team)
        self.binder = binder
        self.op = op
        self.items = items
        self.memory = memory
        self.final = final
        self.steps: list[Callable[[], Any]] = []
        self.made: dict[int, Item] = {}
        self.reused: list[Root | None] = []

    def const(self, i: int) -> np.ndarray:
        item = self.items[i]
        if item is not None and item.state != KNOWN:
            raise Dynamic
        return self.array(i)

    def is_const(self, i: int) -> bool:
        item = self.items[i]
        return item is None or item.state == KNOWN

    def out(self, i: int, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise Dynamic  # strings have no fixed size
        dims = tuple(int(d) for d in shape)
        number = self.op.outputs[i] if i < len(self.op.outputs) else ABSENT
        target = self.binder.target(number)
        root = None
        if target is None:
            array = ordered(dims, order, lambda shape: self.memory.take(_value_name(self.op, i), shape, kind)[0])
            root = self.memory.taken[-1].root
        elif self.final:
            array = self.binder.place(target, self.op.step.outputs[i].dtype, dims, kind)
        else:
            array = self.memory.spare(_value_name(self.op, i), dims, kind)
        self.made[i] = Item(FIXED, array, root)
        return array

    def reuse(self, i: int, source: int, dtype: Any = None) -> np.ndarray:
        x = self.array(source)
        kind = x.dtype if dtype is None else np.dtype(dtype)
        number = self.op.outputs[i] if i < len(self.op.outputs) else ABSENT
        root = None
        if number != ABSENT and self.binder.target(number) is None:
            root = self._dying(source, kind)
        self.reused.append(root)
        if root is None:
            return self.out(i, x.shape, kind, order_of(x))
        scratch = self.binder.region.scratch
        array = x
        if x.dtype != kind or not x.flags.writeable:
            offset = address_of(x) - scratch.base
            array = ordered(x.shape, order_of(x), lambda shape: scratch.array(offset, kind, shape))
        self.made[i] = Item(FIXED, array, root)
        return array

    def _dying(self, source: int, kind: np.dtype[Any]) -> Root | None:
        """The root of an input that may be written over: nothing reads it after this op, nor differently in it."""
        item = self.items[source]
        assert item is not None
        root, x = item.root, item.value
        if root is None or root in self.reused or kind.itemsize != x.dtype.itemsize:
            return None
        if not x.flags.c_contiguous and order_of(x) is None:
            return None
        mine = [other.value for other in self.items if other is not None and other.root is root]
        if self.memory.dies(len(self.reused), root, len(mine)) and all(_same_memory(other, x) for other in mine):
            return root
        return None

    def view(self, i: int, array: np.ndarray) -> None:
        self.made[i] = Item(FIXED, array, self._root_of(array))

    def fixed(self, i: int, array: Any) -> None:
        self.made[i] = Item(KNOWN, np.asarray(array))

    def value(self, i: int, make: Callable[[], Any]) -> None:
        raise Dynamic

    def dynamic(self) -> None:
        raise Dynamic

    def scratch(self, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        name, kind = f"scratch memory of {self.op.origin.name}", np.dtype(dtype)
        return ordered(tuple(int(d) for d in shape), order, lambda dims: self.memory.take(name, dims, kind)[0])

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        return packed_once(self.binder.code, self.op, key, i, make, self.const(i), self.items)

    def step(self, fn: Callable[..., Any], *args: Any) -> None:
        if self.team is None:
            self.steps.append(partial(fn, *args) if args else fn)
        else:
            self.steps.append(self.team.step(fn, args))

    def record(self) -> Record:
        """The op is bound."""
        op = self.op
        makes = {}
        for i, number in enumerate(op.outputs):
            if number == ABSENT:
                continue
            if i not in self.made:
                cause = RuntimeError(f"the kernel made no output {i}")
                fail((op.origin,), op.step.inputs, self.inputs, cause, op.fused)
            makes[number] = self.made[i]
        taken, reused = tuple(self.memory.taken), tuple(self.reused)
        return Record(BOUND, op, op.reads, makes, tuple(self.steps), taken=taken, reused=reused)

    def _root_of(self, array: np.ndarray) -> Root | None:
        if not array.size:
            return None
        low, high = extent_of(array)
        roots = [taken.root for taken in self.memory.taken]
        for root in (*roots, *(item.root for item in self.items if item is not None)):
            if root is not None and root.start <= low < root.end:
                if high > root.end:
                    raise ValueError(f"a view of {array.shape} with strides {array.strides} leaves its memory")
                return root
        return None


class RunMode(Bind):
    """The frame's immediate mode, with memory checked before it is taken and packed weights kept."""

    def __init__(self, around: Surroundings, op: Op, inputs: Sequence[Any]) -> None:
        super().__init__(op.step, inputs, around.threads, around.code.library, around.code.team)
        self.around = around
        self.op = op

    def out(self, i: int, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        dims = tuple(int(d) for d in shape)
        check(_value_name(self.op, i), dims, np.dtype(dtype))
        return super().out(i, dims, dtype, order)

    def scratch(self, shape: Iterable[int], dtype: Any, order: Sequence[int] | None = None) -> np.ndarray:
        dims = tuple(int(d) for d in shape)
        check(f"scratch memory of {self.op.origin.name}", dims, np.dtype(dtype))
        return super().scratch(dims, dtype, order)

    def is_const(self, i: int) -> bool:
        # As in the bound mode, so that an op computes the same way in both.
        number = self.op.inputs[i] if i < len(self.op.inputs) else ABSENT
        return number == ABSENT or self.around.item(number).state == KNOWN

    def step(self, fn: Callable[..., Any], *args: Any) -> None:
        if self.team is None:
            fn(*args)
        else:
            self.team.step(fn, args)()

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        items = [None if number == ABSENT else self.around.item(number) for number in self.op.inputs]
        return packed_once(self.around.code, self.op, key, i, make, self.const(i), items)


def immediate(op: Op, inputs: Sequence[Any], around: Surroundings) -> list[Any]:
    """Execute one node with a kernel now; numpy scalars come back as arrays."""
    assert op.kernel is not None
    bind = RunMode(around, op, inputs)
    try:
        op.kernel.bind(bind, op.parsed)
    except Exception as cause:
        fail((op.origin,), op.step.inputs, inputs, cause, op.fused)
    return [np.asarray(result) if isinstance(result, np.generic) else result for result in bind.results]


def _value_name(op: Op, i: int) -> str:
    return op.step.outputs[i].name if i < len(op.step.outputs) else f"output {i} of {op.origin.name}"


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.shape == b.shape and a.strides == b.strides and address_of(a) == address_of(b))


def packed_once(
    code: Code,
    op: Op,
    key: str,
    i: int,
    make: Callable[[np.ndarray], Any],
    array: np.ndarray,
    items: Sequence[Item | None],
) -> Any:
    item = items[i]
    if item is None or not item.shared:
        return make(array)
    variants = code.packed.setdefault((op, i), {})
    found = variants.pop(key, None)
    if found is None:
        constants = [None if item is None or not item.shared else item.value for item in items]
        found = code.packing.packed(op.step, key, i, constants, make)
        if len(variants) == VARIANTS:
            del variants[next(iter(variants))]  # bindings that use it keep it
    variants[key] = found  # the latest is last
    return found.value


def check(value: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    nbytes = dtype.itemsize
    for dim in shape:
        nbytes *= dim
    if nbytes >= LARGE:
        memory.check(value, nbytes)
