"""Blocks: a unit or a body with names resolved to numbers and every node given its kernel, once, in `compile`.

- **Op**: one lowered node with its kernel, what `parse` made of it, and the numbers of its values.
- **Block**: ops in order, with formals, results and the values it takes from around it (`free`).
- **Code**: the block of a unit, its constants, and what all signatures share (folded results, packed weights).

Numbers are unique over a unit and all its bodies, so a branch whose condition is known can be walked in place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from outrider.providers.contract import ClaimBrokenError, Node, RunCancelledError, Trace, Value
from outrider.providers.cpu.claims import serve
from outrider.providers.cpu.items import KNOWN, Item, fixed_size
from outrider.providers.cpu.kernels.frame import Kernel, Unsupported
from outrider.providers.cpu.native import Library
from outrider.providers.cpu.packing import Packed, Packing
from outrider.providers.cpu.team import Team
from outrider.providers.wire.graph import Graph
from outrider.shm.weights import let_go

ABSENT = -1  # the number of an omitted input or an unnamed output


@dataclass(eq=False)
class Op:
    """One lowered node. `kernel` is None where the executor itself runs it (If, Loop, Scan, SequenceMap).

    `reads`: numbers of the given inputs and captures; `deterministic`: no random operator, bodies included.
    `fused`: the original nodes that it stands for besides `origin`, and `title` what they are together (`fusion/`).
    """

    step: Node
    origin: Node
    kernel: Kernel[Any] | None
    parsed: Any
    reference: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bodies: Mapping[str, Block]
    deterministic: bool
    captures: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    fused: tuple[Node, ...] = ()
    title: str = ""

    @property
    def label(self) -> str:
        """`domain::op` of the original node, or of all that it stands for: `ai.onnx::Conv+Relu`."""
        return self.title or self.origin.label

    def note_reads(self) -> None:
        """Its inputs or its bodies changed: whom it reads."""
        self.captures = tuple(dict.fromkeys(number for body in self.bodies.values() for number in body.free))
        self.reads = tuple(number for number in (*self.inputs, *self.captures) if number != ABSENT)


@dataclass(eq=False)
class Block:
    """Ops in order. `uses` counts the readers of each number: ops, captures of their bodies, results.

    `depth`: of how many stretches (`stretch.py`) it lies in.
    """

    name: str
    formals: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    declared: tuple[Value, ...] = ()
    ops: list[Op] = field(default_factory=list)
    free: tuple[int, ...] = ()
    produced: frozenset[int] = frozenset()
    uses: Counter[int] = field(default_factory=Counter)
    depth: int = 0

    def note_uses(self, is_constant: Callable[[int], bool]) -> None:
        """Its ops or results changed: who reads what."""
        made = {number for op in self.ops for number in op.outputs if number != ABSENT}
        reads = [number for op in self.ops for number in op.reads]
        reads += [number for number in self.results if number != ABSENT]
        own = made.union(self.formals)
        self.uses = Counter(reads)
        self.free = tuple(n for n in dict.fromkeys(reads) if n not in own and not is_constant(n))
        self.produced = frozenset(made)


class Code:
    """A compiled unit, before any signature is known. `reshape`: bindings are made from earlier ones.

    `cancelled`: whether the present run was cancelled, see `Context`. `library`: the compiled kernels, if there are.
    `packing`: what it shares of prepacked weights with other units. `team`: the threads of NumPy steps, if several.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        constants: Mapping[str, np.ndarray],
        trace: Trace | None = None,
        reshape: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
        library: Library | None = None,
        packing: Packing | None = None,
        team: Team | None = None,
    ) -> None:
        self.trace = Trace() if trace is None else trace
        self.reshape = reshape
        self.cancelled = cancelled
        self.library = library
        self.team = team
        self.names: list[str] = []
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.folded: dict[Op, list[Any]] = {}
        self.packing = Packing() if packing is None else packing
        self.packed: dict[tuple[Op, int], dict[str, Packed]] = {}  # by input, then by the kernel's key
        self.high = 0  # bytes of scratch memory that its bindings need, bodies included
        self._constants: dict[int, Callable[[], Any]] = {}
        self._items: dict[int, Item] = {}
        self._outer = constants
        scope: dict[str, int] = {}
        formals = [self._define(scope, value.name) for value in inputs]
        self.top = self._block("", nodes, formals, outputs, [scope])

    def stop_if_cancelled(self) -> None:
        """Raises RunCancelledError if the present run was cancelled."""
        if self.cancelled():
            raise RunCancelledError("the run was cancelled between two steps", reason="cancelled")

    @property
    def reference_nodes(self) -> tuple[str, ...]:
        """Names of the original nodes that the stop-gap serves, wholly or in part, bodies included."""
        return tuple(dict.fromkeys(op.origin.name for op in self.ops if op.reference))

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, those of bodies after the one that has them."""
        return tuple(_ops(self.top))

    def is_constant(self, number: int) -> bool:
        """True for a number that names a constant of the unit or of a body."""
        return number in self._constants

    def constant(self, number: int) -> Item:
        """The state of a constant, whose read-only array is read when first asked for."""
        item = self._items.get(number)
        if item is None:
            item = self._items[number] = Item(KNOWN, self._constants[number](), shared=True)
        return item

    def forget_sources(self) -> None:
        """Let go of constants that only others were made from; whoever asks for one again has it made again."""
        blocks = [self.top, *(body for op in self.ops for body in op.bodies.values())]
        for number in [n for n in self._items if not any(block.uses[n] for block in blocks)]:
            value = self._items.pop(number).value
            if fixed_size(value):
                let_go(value)
        ops = set(self.ops)
        self.folded = {op: results for op, results in self.folded.items() if op in ops}

    def let_go(self) -> None:
        """Let go of all constants. How they are made leads back here, and Python's collector may come late."""
        self._constants.clear()
        self._items.clear()
        self.folded.clear()
        self.packed.clear()

    def known(self, number: int, make: Callable[[], Any]) -> None:
        """`number` names a constant from now on, which `make` gives when it is first asked for."""
        self._constants[number] = make

    def derived(self, name: str, make: Callable[[], Any]) -> int:
        """The number of a new constant, which `make` gives when it is first asked for. `name` is for errors."""
        number = self.fresh(name)
        self.known(number, make)
        return number

    def fresh(self, name: str) -> int:
        """The number of a new value."""
        return self._define({}, name)

    # Building --------------------------------------------------------------------------------------------------------
    def _define(self, scope: dict[str, int], name: str) -> int:
        if not name:
            return ABSENT
        self.names.append(name)
        scope[name] = len(self.names) - 1
        return scope[name]

    def _resolve(self, scopes: Sequence[dict[str, int]], name: str, reader: str) -> int:
        if not name:
            return ABSENT
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
        if name in self._outer:
            number = self._define(scopes[0], name)
            self._constants[number] = partial(operator.getitem, self._outer, name)
            return number
        raise ClaimBrokenError(
            f"node {reader} reads {name!r}, which is neither an input nor a constant nor made by the unit",
            provider="cpu", nodes=[reader], reason=f"{name!r} is not defined",
        )  # fmt: skip

    def _block(
        self,
        name: str,
        nodes: Iterable[Node],
        formals: Sequence[int],
        outputs: Sequence[Value],
        scopes: list[dict[str, int]],
    ) -> Block:
        block = Block(name, formals=tuple(formals), declared=tuple(outputs))
        for origin in nodes:
            block.ops += [self._op(step, origin, scopes) for step in origin.steps()]
        block.results = tuple(self._resolve(scopes, value.name, name or "the unit's outputs") for value in outputs)
        block.note_uses(self.is_constant)
        return block

    def _op(self, step: Node, origin: Node, scopes: list[dict[str, int]]) -> Op:
        try:
            service = serve(step)
        except Unsupported as cause:
            raise ClaimBrokenError(
                f"node {origin.name} ({origin.label}) cannot be compiled: {cause}",
                provider="cpu", nodes=[origin.name], reason=str(cause),
            ) from cause  # fmt: skip
        inputs = tuple(self._resolve(scopes, value.name, origin.name) for value in step.inputs)
        bodies = {}
        if service.kernel is None:
            bodies = {key: self._body(f"{step.name}/{key}", body, scopes) for key, body in step.bodies()}
        outputs = tuple(self._define(scopes[-1], value.name) for value in step.outputs)
        if service.kernel is None:
            deterministic = all(inner.deterministic for body in bodies.values() for inner in body.ops)
        else:
            deterministic = service.kernel.deterministic
        op = Op(step, origin, service.kernel, service.parsed, service.reference, inputs, outputs, bodies, deterministic)
        op.note_reads()
        return op

    def _body(self, name: str, graph: Graph, scopes: list[dict[str, int]]) -> Block:
        scope: dict[str, int] = {}
        for key in graph.constants:
            self._constants[self._define(scope, key)] = partial(operator.getitem, graph.constants, key)
        formals = [self._define(scope, value.name) for value in graph.inputs]
        return self._block(name, graph.nodes, formals, graph.outputs, [*scopes, scope])


def _ops(block: Block) -> Iterator[Op]:
    for op in block.ops:
        yield op
        for body in op.bodies.values():
            yield from _ops(body)
