"""The two modes of the kernel frame inside a program: bound (addresses now, work later) and immediate (all now)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.providers.cpu.arena import LARGE
from outrider.providers.cpu.blocks import ABSENT, Code, Op
from outrider.providers.cpu.items import FIXED, KNOWN, Item, Root
from outrider.providers.cpu.kernels.frame import Bind, Dynamic
from outrider.providers.wire.failures import fail
from outrider.shm import memory
from outrider.shm.segment import address_of

if TYPE_CHECKING:
    from outrider.providers.cpu.binding import Binding


class BoundMode(Bind):
    """The frame's bound mode: addresses are fixed now, steps are recorded."""

    def __init__(self, binding: Binding, op: Op, items: Sequence[Item | None], final: bool) -> None:
        super().__init__(op.step, [None if item is None else item.value for item in items], binding.threads)
        self.binding = binding
        self.op = op
        self.items = items
        self.final = final
        self.roots: list[Root] = []
        self.steps: list[Callable[[], Any]] = []
        self.made: dict[int, Item] = {}
        self.reused: set[Root] = set()
        self._high = binding.region.high

    def const(self, i: int) -> np.ndarray:
        item = self.items[i]
        if item is not None and item.state != KNOWN:
            raise Dynamic
        return self.array(i)

    def is_const(self, i: int) -> bool:
        item = self.items[i]
        return item is None or item.state == KNOWN

    def out(self, i: int, shape: Iterable[int], dtype: Any) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise Dynamic  # strings have no fixed size
        dims = tuple(int(d) for d in shape)
        number = self.op.outputs[i] if i < len(self.op.outputs) else ABSENT
        target = self.binding.target(number) if self.final else None
        if target is not None:
            declared = self.op.step.outputs[i].dtype
            array = self.binding.place(target, declared, dims, kind)
            self.made[i] = Item(FIXED, array)
            return array
        array, root = self._allocate(self._name(i), dims, kind)
        self.made[i] = Item(FIXED, array, root)
        return array

    def reuse(self, i: int, source: int, dtype: Any = None) -> np.ndarray:
        x = self.array(source)
        kind = x.dtype if dtype is None else np.dtype(dtype)
        root = self._dying(source, kind)
        number = self.op.outputs[i] if i < len(self.op.outputs) else ABSENT
        if root is None or number == ABSENT or self.binding.target(number) is not None:
            return self.out(i, x.shape, kind)
        region = self.binding.region
        array = region.scratch.array(address_of(x) - region.scratch.base, kind, x.shape)
        self.reused.add(root)
        self.made[i] = Item(FIXED, array, root)
        return array

    def _dying(self, source: int, kind: np.dtype[Any]) -> Root | None:
        """The root of an input that may be written over: nothing reads it after this op, nor differently in it."""
        item = self.items[source]
        assert item is not None
        root, x = item.root, item.value
        if root is None or root in self.reused or kind.itemsize != x.dtype.itemsize or not x.flags.c_contiguous:
            return None
        mine = [other for other in self.items if other is not None and other.root is root]
        if root.readers != len(mine):
            return None
        if not all(_same_memory(other.value, x) for other in mine):
            return None
        return root

    def view(self, i: int, array: np.ndarray) -> None:
        self.made[i] = Item(FIXED, array, self._root_of(array))

    def fixed(self, i: int, array: Any) -> None:
        self.made[i] = Item(KNOWN, np.asarray(array))

    def value(self, i: int, make: Callable[[], Any]) -> None:
        raise Dynamic

    def dynamic(self) -> None:
        raise Dynamic

    def scratch(self, shape: Iterable[int], dtype: Any) -> np.ndarray:
        return self._allocate(f"scratch memory of {self.op.origin.name}", tuple(shape), np.dtype(dtype))[0]

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        array = self.const(i)
        item = self.items[i]
        return _packed(self.binding.code, self.op, key, i, make, array, item is not None and item.shared)

    def step(self, fn: Callable[..., Any], *args: Any) -> None:
        self.steps.append(partial(fn, *args) if args else fn)

    def commit(self) -> None:
        """The op is bound: its steps join the line, its outputs get their states, its dead inputs are freed."""
        for step in self.steps:
            self.binding.record(self.op, step)
        for i, number in enumerate(self.op.outputs):
            if number == ABSENT:
                continue
            if i not in self.made:
                fail(
                    (self.op.origin,), self.op.step.inputs, self.inputs, RuntimeError(f"the kernel made no output {i}")
                )
            self.binding.set(number, self.made[i])
        self.binding.release_inputs(self.op)
        for root in self.roots:
            self.binding.free_if_dead(root)

    def discard(self) -> None:
        """The attempt is forgotten."""
        for root in self.roots:
            self.binding.region.free(root.offset)
        self.roots.clear()
        self.binding.region.high = self._high

    def _allocate(self, name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[np.ndarray, Root | None]:
        if 0 in shape:
            return np.empty(shape, kind), None
        array, offset, nbytes = self.binding.region.allocate(name, shape, kind)
        root = Root(offset, address_of(array), nbytes)
        self.roots.append(root)
        return array, root

    def _root_of(self, array: np.ndarray) -> Root | None:
        if not array.size:
            return None
        low, high = np.lib.array_utils.byte_bounds(array)
        for root in (*self.roots, *(item.root for item in self.items if item is not None)):
            if root is not None and root.start <= low < root.end:
                if high > root.end:
                    raise ValueError(f"a view of {array.shape} with strides {array.strides} leaves its memory")
                return root
        return None

    def _name(self, i: int) -> str:
        return _value_name(self.op, i)


class RunMode(Bind):
    """The frame's immediate mode, with memory checked before it is taken and packed weights kept."""

    def __init__(self, binding: Binding, op: Op, inputs: Sequence[Any]) -> None:
        super().__init__(op.step, inputs, binding.threads)
        self.binding = binding
        self.op = op

    def out(self, i: int, shape: Iterable[int], dtype: Any) -> np.ndarray:
        dims = tuple(int(d) for d in shape)
        _check(_value_name(self.op, i), dims, np.dtype(dtype))
        return super().out(i, dims, dtype)

    def scratch(self, shape: Iterable[int], dtype: Any) -> np.ndarray:
        dims = tuple(int(d) for d in shape)
        _check(f"scratch memory of {self.op.origin.name}", dims, np.dtype(dtype))
        return super().scratch(dims, dtype)

    def is_const(self, i: int) -> bool:
        # As in the bound mode, so that an op computes the same way in both.
        number = self.op.inputs[i] if i < len(self.op.inputs) else ABSENT
        return number == ABSENT or self.binding.item(number).state == KNOWN

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        item = self.binding.item(self.op.inputs[i])
        return _packed(self.binding.code, self.op, key, i, make, self.const(i), item.shared)


def immediate(op: Op, inputs: Sequence[Any], binding: Binding) -> list[Any]:
    """Execute one node with a kernel now; numpy scalars come back as arrays."""
    assert op.kernel is not None
    bind = RunMode(binding, op, inputs)
    try:
        op.kernel.bind(bind, op.parsed)
    except Exception as cause:
        fail((op.origin,), op.step.inputs, inputs, cause)
    return [np.asarray(result) if isinstance(result, np.generic) else result for result in bind.results]


def _value_name(op: Op, i: int) -> str:
    return op.step.outputs[i].name if i < len(op.step.outputs) else f"output {i} of {op.origin.name}"


def _same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.strides == b.strides and address_of(a) == address_of(b)


def _packed(
    code: Code, op: Op, key: str, i: int, make: Callable[[np.ndarray], Any], array: np.ndarray, shared: bool
) -> Any:
    if not shared:
        return make(array)
    place = (op, key, i)
    if place not in code.packed:
        code.packed[place] = make(array)
    return code.packed[place]


def _check(value: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    nbytes = dtype.itemsize
    for dim in shape:
        nbytes *= dim
    if nbytes >= LARGE:
        memory.check(value, nbytes)
