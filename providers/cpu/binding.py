"""A block bound to one signature: fixed addresses, a straight line of prepared calls, and a rest bound anew in each run.

Binding walks the ops in order. Every value is in one of three states (**Item**):

- KNOWN: its contents are known now: constants, `Shape`, and whatever deterministic kernels make of such, executed here;
- FIXED: its address, dtype and shape are known now, its contents in the run;
- LATE: all of that is known in the run only; so is everything that depends on it. LATE ops form the unbound stretch: they
  run after the bound steps, in order, and what they read stays allocated until then.

Memory of FIXED values comes from a Region. A **Root** is one allocated block; views share it, and it is free again after
the last reader of all of them. An op may write over a dying input (`reuse`) if it is the only reader left of the root.
"""

from __future__ import annotations

import operator
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from outrider.providers.contract import KernelError, Place
from outrider.providers.cpu.arena import LARGE, Region, address
from outrider.providers.cpu.blocks import ABSENT, Block, Code, Op
from outrider.providers.cpu.kernels.frame import Bind, Dynamic
from outrider.providers.wire.dtypes import is_tensor, numpy_dtype, onnx_name
from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError, OutriderError

KNOWN, FIXED, LATE = "known", "fixed", "late"
_FOREVER = 1 << 60


class Root:
    """One allocated block. `readers`: reads left, of all values that lie in it."""

    __slots__ = ("offset", "start", "end", "readers")

    def __init__(self, offset: int, start: int, nbytes: int) -> None:
        self.offset = offset
        self.start = start
        self.end = start + nbytes
        self.readers = 0


class Item:
    """The state of one value. `shared`: KNOWN and the same for every signature. `root`: the block of a FIXED value."""

    __slots__ = ("state", "value", "root", "shared")

    def __init__(self, state: str, value: Any = None, root: Root | None = None, shared: bool = False) -> None:
        self.state = state
        self.value = value
        self.root = root
        self.shared = shared


LATE_ITEM = Item(LATE)


class LateOp(Protocol):
    """A node of the unbound stretch."""

    op: Op

    def __call__(self, env: dict[int, Any]) -> None:
        """Read what is late from `env`, put the outputs there."""


class Binding:
    """One block, bound. `items`: the states of its formals and free values; `place`: for the outputs of a unit.

    `run(env)` takes the values of LATE formals and free values by number, runs, and leaves late results in `env`.
    """

    def __init__(
        self,
        code: Code,
        block: Block,
        region: Region,
        items: Mapping[int, Item],
        place: Place | None = None,
        threads: int = 1,
    ) -> None:
        self.code = code
        self.block = block
        self.region = region
        self.threads = threads
        self.late: list[LateOp] = []
        self._items = dict(items)
        self._uses: Counter[int] = Counter(block.uses)
        self._steps: list[Callable[[], Any]] = []
        self._owners: list[Op] = []
        self._place = place
        self.placed: dict[int, np.ndarray] = {}
        self._targets: dict[int, int] = {}
        if place is not None:
            for i, number in enumerate(block.results):
                if number in block.produced:
                    self._targets.setdefault(number, i)
        with np.errstate(all="ignore"):
            self._walk(block)
            if place is not None:
                self._deliver(place)
        self.steps = tuple(self._steps)
        self._releases = self._last_readers()
        region.scratch.ensure(region.high, "the scratch memory of a program")
        self.results = tuple(LATE_ITEM if n == ABSENT else self.item(n) for n in block.results)

    # Items -----------------------------------------------------------------------------------------------------------
    def item(self, number: int) -> Item:
        """The state of a value; constants are read when first asked for."""
        item = self._items.get(number)
        if item is None:
            item = self._items[number] = Item(KNOWN, self.code.constant(number), shared=True)
        return item

    def target(self, number: int) -> int | None:
        """The unit output that a value is, if any."""
        return self._targets.get(number)

    def readers(self, number: int) -> int:
        """How many reads of the value this binding will make."""
        return self._uses[number]

    def place(self, i: int, declared: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """The place of unit output `i`, asked for once."""
        assert self._place is not None
        if is_tensor(declared) and numpy_dtype(declared) == dtype:
            name = declared
        else:
            name = onnx_name(dtype)
        self.placed[i] = array = self._place(i, name, shape)
        return array

    def keep(self, number: int) -> Item:
        """The value is read in the run by a late op: its memory is not given to others. Returns its state."""
        item = self.item(number)
        if item.root is not None:
            item.root.readers += _FOREVER
        return item

    # Walking ---------------------------------------------------------------------------------------------------------
    def _walk(self, block: Block) -> None:
        for op in block.ops:
            if op.kernel is None:
                self._control(op)
            else:
                self._kernel(op)

    def _control(self, op: Op) -> None:
        from outrider.providers.cpu.control import branch_of, late_control  # it binds bodies, so it needs this module

        condition = self.item(op.inputs[0]) if op.step.op_type == "If" else LATE_ITEM
        if condition.state == KNOWN:
            self._inline(op, branch_of(op, condition.value))
        else:
            self.add_late(late_control(op, self), op)

    def _inline(self, op: Op, branch: Block) -> None:
        """Walk the branch of an If whose condition is known as if it stood here."""
        for number in branch.produced:
            self._uses[number] += branch.uses[number]
        for number in branch.free:
            self._add_readers(number, branch.uses[number])
        pairs = [(out, inner) for out, inner in zip(op.outputs, branch.results, strict=True) if out != ABSENT]
        for out, inner in pairs:
            if out in self._targets and inner in branch.produced:
                self._targets.setdefault(inner, self._targets[out])
        self._walk(branch)
        for out, inner in pairs:
            self._items[out] = item = self.item(inner)
            self._add_readers(out, self._uses[out])
            if item.state == LATE:
                self.late.append(_Alias(op, inner, out))
        for number in (*branch.results, *op.captures, *op.inputs):
            self._release(number)

    def _kernel(self, op: Op) -> None:
        assert op.kernel is not None
        items = [None if number == ABSENT else self.item(number) for number in op.inputs]
        given = [item for item in items if item is not None]
        if all(item.state == KNOWN for item in given) and op.kernel.deterministic:
            self._fold(op, items)
        elif all(_plain(item) for item in given):
            self._bind(op, items)
        else:
            self.add_late(_LateKernel(op, self), op)

    def _fold(self, op: Op, items: Sequence[Item | None]) -> None:
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
        for number, result in zip(op.outputs, results, strict=True):
            if number != ABSENT:
                self._items[number] = Item(KNOWN, result, shared=shared)

    def _bind(self, op: Op, items: Sequence[Item | None]) -> None:
        assert op.kernel is not None
        # A kernel may find out that it is dynamic after it asked for an output. A place cannot be given back, so where
        # one will be asked for, a first attempt takes ordinary memory.
        attempts = (False, True) if any(number in self._targets for number in op.outputs) else (True,)
        for final in attempts:
            bind = _BoundBind(self, op, items, final)
            try:
                op.kernel.bind(bind, op.parsed)
            except Dynamic:
                bind.discard()
                self.add_late(_LateKernel(op, self), op)
                return
            except Exception as cause:
                bind.discard()
                fail(op, bind.inputs, cause)
            if final:
                bind.commit()
            else:
                bind.discard()

    def add_late(self, late: LateOp, op: Op) -> None:
        """Put a node into the unbound stretch."""
        for number in op.outputs:
            if number != ABSENT:
                self._items[number] = LATE_ITEM
        self.late.append(late)

    def record(self, op: Op, step: Callable[[], Any]) -> None:
        """Append a call to the straight line."""
        self._steps.append(step)
        self._owners.append(op)

    def set(self, number: int, item: Item) -> None:
        """Record the state of a value that an op made."""
        self._items[number] = item
        self._add_readers(number, self._uses[number])

    def _add_readers(self, number: int, count: int) -> None:
        root = self.item(number).root
        if root is not None:
            root.readers += count

    def release_inputs(self, op: Op) -> None:
        """The bound op has read its inputs."""
        for number in op.inputs:
            self._release(number)

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

    def _deliver(self, place: Place) -> None:
        """Copy into their places the unit outputs that are no fresh results: views, constants, inputs, duplicates."""
        for i, number in enumerate(self.block.results):
            if number == ABSENT or i in self.placed:
                continue
            item = self.item(number)
            if item.state == LATE or not _plain(item) or item.value is None:
                continue
            source = item.value
            target = self.place(i, self.code.outputs[i].dtype, source.shape, source.dtype)
            owner = next((op for op in self.block.ops if number in op.outputs), None)
            self._steps.append(partial(np.copyto, target, source))
            self._owners.append(owner if owner is not None else self.block.ops[-1])

    def _last_readers(self) -> list[tuple[int, ...]]:
        """Per late op, the late values that nobody reads after it."""
        seen = {number for number in self.block.results if number != ABSENT}
        releases: list[tuple[int, ...]] = []
        for late in reversed(self.late):
            numbers = {n for n in _reads(late) if n != ABSENT and self.item(n).state == LATE}
            releases.append(tuple(numbers - seen))
            seen |= numbers
        return releases[::-1]

    # Running ---------------------------------------------------------------------------------------------------------
    def run(self, env: dict[int, Any]) -> None:
        """Run once. Raises KernelError naming the node that failed, or an Outrider error that one raised."""
        with np.errstate(all="ignore"):
            steps = iter(self.steps)
            try:
                for step in steps:
                    step()
            except Exception as cause:
                at = len(self.steps) - operator.length_hint(steps) - 1
                op = self._owners[at]
                inputs = [None if n == ABSENT else self.item(n).value for n in op.inputs]
                fail(op, inputs, cause)
            for late, dead in zip(self.late, self._releases):  # noqa: B905 (made together)
                late(env)
                for number in dead:
                    env.pop(number, None)


class _BoundBind(Bind):
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
        array = region.scratch.array(address(x) - region.scratch.base, kind, x.shape)
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
        same = all(o.value.shape == x.shape and o.value.strides == x.strides and address(o.value) == address(x) for o in mine)
        return root if same and x.size else None

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
                fail(self.op, self.inputs, RuntimeError(f"the kernel made no output {i}"))
            self.binding.set(number, self.made[i])
        self.binding.release_inputs(self.op)
        for root in self.roots:
            self.binding.free_if_dead(root)

    def discard(self) -> None:
        """The attempt is forgotten."""
        for root in self.roots:
            self.binding.region.free(root.offset)
        self.roots.clear()

    def _allocate(self, name: str, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[np.ndarray, Root | None]:
        if 0 in shape:
            return np.empty(shape, kind), None
        array, offset, nbytes = self.binding.region.allocate(name, shape, kind)
        root = Root(offset, address(array), nbytes)
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
        return self.op.step.outputs[i].name if i < len(self.op.step.outputs) else f"output {i} of {self.op.origin.name}"


class _RunBind(Bind):
    """The frame's immediate mode, with memory checked before it is taken and packed weights kept."""

    def __init__(self, binding: Binding, op: Op, inputs: Sequence[Any]) -> None:
        super().__init__(op.step, inputs, binding.threads)
        self.binding = binding
        self.op = op

    def out(self, i: int, shape: Iterable[int], dtype: Any) -> np.ndarray:
        dims = tuple(int(d) for d in shape)
        _check(self.op.origin.name, dims, np.dtype(dtype))
        return super().out(i, dims, dtype)

    def scratch(self, shape: Iterable[int], dtype: Any) -> np.ndarray:
        dims = tuple(int(d) for d in shape)
        _check(f"scratch memory of {self.op.origin.name}", dims, np.dtype(dtype))
        return super().scratch(dims, dtype)

    def packed(self, key: str, i: int, make: Callable[[np.ndarray], Any]) -> Any:
        item = self.binding.item(self.op.inputs[i])
        return _packed(self.binding.code, self.op, key, i, make, self.const(i), item.shared)


class _LateKernel:
    """A node with a kernel that is bound anew in each run, when every input is there."""

    def __init__(self, op: Op, binding: Binding) -> None:
        self.op = op
        self.binding = binding
        self.sources = [None if number == ABSENT else binding.keep(number) for number in op.inputs]

    def __call__(self, env: dict[int, Any]) -> None:
        inputs = [
            None if item is None else env[number] if item.state == LATE else item.value
            for item, number in zip(self.sources, self.op.inputs)  # noqa: B905 (made together)
        ]
        for number, result in zip(self.op.outputs, immediate(self.op, inputs, self.binding)):  # noqa: B905
            if number != ABSENT:
                env[number] = result


class _Alias:
    """An output of an inlined If that its branch makes late."""

    def __init__(self, op: Op, inner: int, outer: int) -> None:
        self.op = op
        self.inner = inner
        self.outer = outer

    def __call__(self, env: dict[int, Any]) -> None:
        env[self.outer] = env[self.inner]


def immediate(op: Op, inputs: Sequence[Any], binding: Binding) -> list[Any]:
    """Execute one node with a kernel now; numpy scalars come back as arrays."""
    assert op.kernel is not None
    bind = _RunBind(binding, op, inputs)
    try:
        op.kernel.bind(bind, op.parsed)
    except Exception as cause:
        fail(op, inputs, cause)
    return [np.asarray(result) if isinstance(result, np.generic) else result for result in bind.results]


def fail(op: Op, inputs: Sequence[Any], cause: Exception) -> NoReturn:
    """Raise what a failed node means: Outrider's own errors as they are, short memory as such, the rest as KernelError."""
    if isinstance(cause, OutriderError):
        raise cause
    origin = op.origin
    if isinstance(cause, MemoryError):
        raise OutOfMemoryError(
            f"node {origin.name} ({origin.label}) ran out of memory: {cause}; use smaller inputs",
            value=origin.name, available=memory.available_bytes(),
        ) from cause  # fmt: skip
    described = [
        (value.name, *_describe(value.dtype, item))
        for value, item in zip(op.step.inputs, [*inputs, *[None] * len(op.step.inputs)])  # noqa: B905 (padded)
    ]
    listed = ", ".join(f"{name or '(omitted)'}: {dtype}{list(shape) if shape is not None else ''}" for name, dtype, shape in described)
    reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    raise KernelError(
        f"node {origin.name} ({origin.label}, opset {origin.opset}) failed: {reason}; its inputs were {listed or 'none'}",
        provider="cpu", node=origin.name, op=origin.label, opset=origin.opset, inputs=described, cause=reason,
        remote_traceback="".join(traceback.format_exception(cause)),
    ) from cause  # fmt: skip


def _describe(declared: str, item: Any) -> tuple[str, tuple[int, ...] | None]:
    """(dtype, shape) of what arrived; `declared` where it is not a tensor."""
    if not isinstance(item, np.ndarray):
        return declared, None
    try:
        return onnx_name(item.dtype), item.shape
    except ValueError:
        return str(item.dtype), item.shape


def _plain(item: Item) -> bool:
    """True for what a bound kernel may see: an array of fixed-size elements at a fixed address, or nothing."""
    if item.state == LATE:
        return False
    return item.value is None or (isinstance(item.value, np.ndarray) and not item.value.dtype.hasobject)


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


def _reads(late: LateOp) -> tuple[int, ...]:
    if isinstance(late, _Alias):
        return (late.inner,)
    return (*late.op.inputs, *late.op.captures)
