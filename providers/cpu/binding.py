"""A block bound to one signature: fixed addresses, a line of prepared calls, and a rest that is bound in each run.

It is made from nothing (`walk.py`) or from an earlier binding of the same block (`reshape.py`). LATE ops, and all that
depends on them, form the unbound stretch: they run after the bound steps, in order, and what they read stays allocated
until then. Where it is long, most of it is a block that is bound in the run (`stretch.py`).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from time import monotonic_ns
from typing import Any, NoReturn, Protocol

import numpy as np

from outrider.providers.cpu.arena import Region
from outrider.providers.cpu.blocks import ABSENT, Block, Code, Op
from outrider.providers.cpu.items import LATE, LATE_ITEM, Item
from outrider.providers.cpu.modes import immediate
from outrider.providers.cpu.native import Call, merged
from outrider.providers.cpu.operations import operations
from outrider.providers.cpu.records import BOUND, Record
from outrider.providers.wire.failures import fail

# Bytes of scratch memory of a program -> steps between two looks whether the run was cancelled. A look takes 0.2 us, as
# the smallest steps do; those of large programs take ten times as long, or a million.
GROUPS = ((1 << 22, 1), (1 << 18, 8), (0, 32))


class LateOp(Protocol):
    """A node of the unbound stretch, or several. `reads`: numbers of what it needs."""

    @property
    def ops(self) -> Sequence[Op]: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        """Read what is late from `env`, put the outputs there. `binding` is the one it belongs to."""

    def bindings(self) -> Sequence[Binding]:
        """The latest of each body that has run."""


class Plan:
    """What the bindings made from one walk share: where memory is, and which record reads and makes what."""

    def __init__(self, region: Region, targets: Mapping[int, int], records: Sequence[Record]) -> None:
        self.region = region
        self.targets = targets
        self._records = records

    @cached_property
    def readers(self) -> Mapping[int, Sequence[int]]:
        """The records that read each value, by number."""
        readers: dict[int, list[int]] = {}
        for at, record in enumerate(self._records):
            for number in record.reads:
                readers.setdefault(number, []).append(at)
        return readers

    @cached_property
    def always(self) -> Sequence[int]:
        """The records that no later binding takes over: what writes to places, and random operators."""
        return [at for at, record in enumerate(self._records) if self._differs(record)]

    def _differs(self, record: Record) -> bool:
        if record.op is None:
            return False
        placed = record.kind == BOUND and not self.targets.keys().isdisjoint(record.makes)
        return placed or not record.op.deterministic


class Binding:
    """One block, bound.

    `run(env)` takes the values of LATE formals and free values by number, runs, and leaves late results in `env`.
    `placed`: the arrays of unit outputs, by position; `ending`: copies to those that no op writes.
    """

    def __init__(
        self,
        code: Code,
        block: Block,
        threads: int,
        plan: Plan,
        items: dict[int, Item],
        records: Sequence[Record],
        placed: Mapping[int, np.ndarray],
        ending: Sequence[Callable[[], Any]],
    ) -> None:
        self.code = code
        self.block = block
        self.threads = threads
        self._trace = code.trace
        self.plan = plan
        self.items = items
        self.records = records
        self.placed = placed
        self.late = [record.late for record in records if record.late is not None]
        self._ending = ending
        self._group = next(steps for nbytes, steps in GROUPS if plan.region.high >= nbytes)
        self.steps = self._line()
        self.results = tuple(LATE_ITEM if n == ABSENT else self.item(n) for n in block.results)
        self._releases = self._last_readers()

    def _line(self) -> tuple[Callable[[], Any], ...]:
        """The bound steps, and between two groups of them a look whether the run goes on."""
        return tuple(call for call, _ in self._calls())

    def _calls(self) -> list[tuple[Callable[[], Any], int]]:
        """What the line consists of, each with the position of its first bound step; -1 for a look.

        Calls of the compiled library that follow one another are one.
        """
        steps = self._bound_steps()
        line: list[tuple[Callable[[], Any], int]] = []
        for start in range(0, len(steps), self._group):
            if start:
                line.append((self.code.stop_if_cancelled, -1))
            line += merged(steps[start : start + self._group], start)
        return line

    def _bound_steps(self) -> list[Callable[[], Any]]:
        return [*itertools.chain.from_iterable([record.steps for record in self.records]), *self._ending]

    def all(self) -> Iterator[Binding]:
        """This one and the latest of each body in it."""
        yield self
        inside = [inner for late in self.late for inner in late.bindings()]
        inside += [inner for step in self._bound_steps() if isinstance(step, Chosen) for inner in step.bindings()]
        for inner in inside:
            yield from inner.all()

    @property
    def kernels(self) -> Counter[str]:
        """How many of the bound steps, of bodies too, each compiled kernel does, and `numpy` the others."""
        return Counter(_kernel_name(step) for one in self.all() for step in one._bound_steps())

    @property
    def region(self) -> Region:
        """Where its memory lies."""
        return self.plan.region

    def item(self, number: int) -> Item:
        """The state of a value; constants are read when first asked for."""
        item = self.items.get(number)
        if item is None:
            item = self.items[number] = self.code.constant(number)
        return item

    @cached_property
    def _owners(self) -> Sequence[Op | None]:
        """Per bound step the op to name when it fails."""
        owners: list[Op | None] = [record.op for record in self.records for _ in record.steps]
        return owners + [None] * len(self._ending)

    def _last_readers(self) -> list[tuple[int, ...]]:
        """Per late op, the late values that nobody reads after it."""
        seen = {number for number in self.block.results if number != ABSENT}
        releases: list[tuple[int, ...]] = []
        for late in reversed(self.late):
            numbers = {n for n in late.reads if self.item(n).state == LATE}
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
            _, first = self._calls()[len(self.steps) - operator.length_hint(steps) - 1]
            self._failed(None if first < 0 else self._owners[first], cause)  # a look: the run was cancelled
        for late, dead in zip(self.late, self._releases, strict=True):
            self.code.stop_if_cancelled()
            late(env, self)
            for number in dead:
                env.pop(number, None)

    def _failed(self, op: Op | None, cause: Exception) -> NoReturn:
        """Raise what a step's exception means for the node it belongs to."""
        if op is None:
            raise cause
        inputs = [None if n == ABSENT else self.item(n).value for n in op.inputs]
        fail((op.origin,), op.step.inputs, inputs, cause, op.fused)

    def _run_traced(self, env: dict[int, Any]) -> None:
        """`run_inside` with a span per node, and one for copies into places."""
        pairs = zip(self._bound_steps(), self._owners, strict=True)
        for op, group in itertools.groupby(pairs, key=lambda pair: pair[1]):
            steps = [step for step, _ in group]
            self.code.stop_if_cancelled()
            start = monotonic_ns()
            try:
                for step in steps:
                    step()
            except Exception as cause:
                self._failed(op, cause)
            end = monotonic_ns()
            if op is None:
                self._trace.span("results", start, end)
            else:
                self._told(op, start, end, {}, steps)
        for late, dead in zip(self.late, self._releases, strict=True):
            start = monotonic_ns()
            late(env, self)
            if len(late.ops) == 1:  # several tell of themselves
                self._told(late.ops[0], start, monotonic_ns(), env)
            for number in dead:
                env.pop(number, None)

    def _told(
        self, op: Op, start: int, end: int, env: Mapping[int, Any], steps: Sequence[Callable[[], Any]] = ()
    ) -> None:
        """The span of an op that ran in these steps, or late; what is late is in `env`."""
        given, made = (
            [None if n == ABSENT else env[n] if n in env else self.item(n).value for n in numbers]
            for numbers in (op.inputs, op.outputs)
        )
        nbytes = sum(value.nbytes for value in made if isinstance(value, np.ndarray))
        names = dict.fromkeys(map(_kernel_name, steps))
        kernel = " ".join([op.step.op_type, *names])
        self._trace.span(op.origin.name, start, end, op.label, nbytes, kernel, operations(op.step, given, made))


def _kernel_name(step: Callable[[], Any]) -> str:
    return step.name if isinstance(step, Call) else "numpy"


class Chosen:
    """A bound step that runs one of several bodies."""

    def bindings(self) -> Sequence[Binding]:
        """The latest of each body that has run."""
        raise NotImplementedError

    def __call__(self) -> None:
        raise NotImplementedError


class LateKernel:
    """A node with a kernel that is bound anew in each run, when every input is there. `sources`: its inputs' states."""

    def __init__(self, op: Op, sources: Sequence[Item | None]) -> None:
        self.op = op
        self.ops = (op,)
        self.reads = op.reads
        self.sources = sources

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        inputs = [
            None if item is None else env[number] if item.state == LATE else item.value
            for item, number in zip(self.sources, self.op.inputs, strict=True)
        ]
        for number, result in zip(self.op.outputs, immediate(self.op, inputs, binding), strict=True):
            if number != ABSENT:
                env[number] = result

    def bindings(self) -> Sequence[Binding]:
        return ()


class LateAlias:
    """An output of an If in whose branch, known while binding, it is late."""

    def __init__(self, op: Op, inner: int, outer: int) -> None:
        self.ops = (op,)
        self.reads = (inner,)
        self.inner = inner
        self.outer = outer

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        env[self.outer] = env[self.inner]

    def bindings(self) -> Sequence[Binding]:
        return ()
