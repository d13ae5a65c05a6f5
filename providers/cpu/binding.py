"""A block bound to one signature: fixed addresses, a line of prepared calls, and a rest that is bound in each run.

Binding walks the ops in order and gives every value a state (`items.py`). LATE ops, and all that depends on them, form
the unbound stretch: they run after the bound steps, in order, and what they read stays allocated until then.

Memory comes from a Region. A root is one allocated block; views share it, and it is free again after the last reader of
all of them. An op may write over a dying input (`reuse`) if it is the only reader left of the root.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic_ns
from typing import Any, NoReturn, Protocol

import numpy as np

from outrider.providers.contract import Place
from outrider.providers.cpu.arena import Region
from outrider.providers.cpu.blocks import ABSENT, Block, Code, Op
from outrider.providers.cpu.items import KNOWN, LATE, LATE_ITEM, Item, Root, plain
from outrider.providers.cpu.kernels.frame import Dynamic
from outrider.providers.cpu.modes import BoundMode, immediate
from outrider.providers.wire.dtypes import is_tensor, numpy_dtype, onnx_name
from outrider.providers.wire.failures import fail

_FOREVER = 1 << 60


class LateOp(Protocol):
    """A node of the unbound stretch."""

    op: Op

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        """Read what is late from `env`, put the outputs there. `binding` is the one it belongs to."""


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
        self._trace = code.trace
        self.late: list[LateOp] = []
        self._items = dict(items)
        self._uses: Counter[int] = Counter(block.uses)
        self._steps: list[Callable[[], Any]] = []
        self._owners: list[Op | None] = []
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
        self._place = None  # it may lead back to whoever holds this binding
        self.steps = tuple(self._steps)
        self._releases = self._last_readers()
        region.scratch.ensure(region.high, "the scratch memory of a program")
        code.high = max(code.high, region.high)
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
        name = declared if is_tensor(declared) and numpy_dtype(declared) == dtype else onnx_name(dtype)
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
        elif all(plain(item) for item in given):
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
            bind = BoundMode(self, op, items, final)
            try:
                op.kernel.bind(bind, op.parsed)
            except Dynamic:
                bind.discard()
                self.add_late(_LateKernel(op, self), op)
                return
            except Exception as cause:
                bind.discard()
                fail((op.origin,), op.step.inputs, bind.inputs, cause)
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

    def record(self, op: Op | None, step: Callable[[], Any]) -> None:
        """Append a call to the straight line; `op` is the one to name when it fails."""
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
            if item.state == LATE or not plain(item) or item.value is None:
                continue
            source = item.value
            target = self.place(i, self.code.outputs[i].dtype, source.shape, source.dtype)
            self.record(None, partial(np.copyto, target, source))

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
            self.run_inside(env)

    def run_inside(self, env: dict[int, Any]) -> None:
        """`run` inside that of the program around it: numpy's floating-point warnings are off already."""
        if self._trace.on:
            self._run_traced(env)
            return
        steps = iter(self.steps)
        try:
            for step in steps:
                step()
        except Exception as cause:
            self._failed(self._owners[len(self.steps) - operator.length_hint(steps) - 1], cause)
        for late, dead in zip(self.late, self._releases, strict=True):
            late(env, self)
            for number in dead:
                env.pop(number, None)

    def _failed(self, op: Op | None, cause: Exception) -> NoReturn:
        """Raise what a step's exception means for the node it belongs to."""
        if op is None:
            raise cause
        inputs = [None if n == ABSENT else self.item(n).value for n in op.inputs]
        fail((op.origin,), op.step.inputs, inputs, cause)

    def _run_traced(self, env: dict[int, Any]) -> None:
        """`run_inside` with a span per node, and one for copies into places."""
        pairs = zip(self.steps, self._owners, strict=True)
        for _, line in itertools.groupby(pairs, key=lambda pair: None if pair[1] is None else id(pair[1].origin)):
            start = monotonic_ns()
            for step, op in line:
                try:
                    step()
                except Exception as cause:
                    self._failed(op, cause)
            self._told(op, start, [] if op is None else [self.item(n).value for n in op.outputs if n != ABSENT])
        for late, dead in zip(self.late, self._releases, strict=True):
            start = monotonic_ns()
            late(env, self)
            self._told(late.op, start, [env.get(n) for n in late.op.outputs])
            for number in dead:
                env.pop(number, None)

    def _told(self, op: Op | None, start: int, made: Sequence[Any]) -> None:
        """The span of a node that ran since `start` and made these values."""
        nbytes = sum(value.nbytes for value in made if isinstance(value, np.ndarray))
        if op is None:
            self._trace.span("results", start, monotonic_ns())
        else:
            self._trace.span(op.origin.name, start, monotonic_ns(), op.origin.label, nbytes)


class _LateKernel:
    """A node with a kernel that is bound anew in each run, when every input is there."""

    def __init__(self, op: Op, binding: Binding) -> None:
        self.op = op
        self.sources = [None if number == ABSENT else binding.keep(number) for number in op.inputs]

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        inputs = [
            None if item is None else env[number] if item.state == LATE else item.value
            for item, number in zip(self.sources, self.op.inputs, strict=True)
        ]
        for number, result in zip(self.op.outputs, immediate(self.op, inputs, binding), strict=True):
            if number != ABSENT:
                env[number] = result


class _Alias:
    """An output of an inlined If that its branch makes late."""

    def __init__(self, op: Op, inner: int, outer: int) -> None:
        self.op = op
        self.inner = inner
        self.outer = outer

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        env[self.outer] = env[self.inner]


def _reads(late: LateOp) -> tuple[int, ...]:
    if isinstance(late, _Alias):
        return (late.inner,)
    return (*late.op.inputs, *late.op.captures)
