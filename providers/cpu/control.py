"""Control flow: If, Loop, Scan and SequenceMap as nodes of the unbound stretch.

A body is bound like a unit. Constants, and values of the program around it that have fixed addresses, are used in
place; what arrives anew in each call (formals, late captures) is copied into staging arrays, so that one binding serves
all calls of a signature. A few bindings are kept; a body whose signature keeps changing is run with everything unbound
instead. Results are copied out: nothing that a later call overwrites leaves a body. When the program around it is
re-shaped, so are its bodies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider.providers.contract import KernelError, Value
from outrider.providers.cpu.binding import Binding, Chosen, LateOp
from outrider.providers.cpu.blocks import ABSENT, Block, Op
from outrider.providers.cpu.building import Builder, Stage
from outrider.providers.cpu.conditions import single, truth
from outrider.providers.cpu.items import FIXED, LATE, LATE_ITEM, Item, fixed_size
from outrider.providers.cpu.lineage import Lineage
from outrider.providers.cpu.modes import OpMemory
from outrider.providers.cpu.records import BOUND, Record
from outrider.providers.wire.dtypes import is_tensor, numpy_dtype
from outrider.providers.wire.failures import fail
from outrider.shm.errors import OutOfMemoryError

BINDINGS = 16  # per body and binding of the program around it


def late_control(op: Op, parent: Builder, before: LateOp | None) -> LateOp:
    """The node as it is run in the unbound stretch of `parent`. `before`: as it was in an earlier binding."""
    return _KINDS[op.step.op_type](op, parent, before if isinstance(before, _Control) else None)


class _Bound:
    """A body bound to one signature. Arguments that have an address in it are copied there, others stay values."""

    def __init__(self, binding: Binding, numbers: Sequence[int]) -> None:
        self.binding = binding
        self._arguments = tuple((number, binding.item(number).value) for number in numbers)
        scratch = binding.region.scratch
        self._results = tuple(
            (
                number if item.state == LATE else ABSENT,
                item.value,
                isinstance(item.value, np.ndarray) and scratch.contains(item.value),
            )
            for number, item in zip(binding.block.results, binding.results, strict=True)
        )

    def call(self, given: Sequence[Any]) -> list[Any]:
        """Copy in, run, copy out."""
        env: dict[int, Any] = {}
        for (number, stage), item in zip(self._arguments, given, strict=True):
            if stage is None:
                env[number] = item
            else:
                np.copyto(stage, item)
        self.binding.run_inside(env)
        return [
            value.copy() if copied else value if number == ABSENT else self._own(env[number])
            for number, value, copied in self._results
        ]

    def _own(self, value: Any) -> Any:
        """The value, copied where it lies in memory that a later call may overwrite."""
        if isinstance(value, np.ndarray):
            return value.copy() if self.binding.region.scratch.contains(value) else value
        if isinstance(value, list):
            return [self._own(item) for item in value]
        return value


class Body:
    """One body inside one binding of the program around it."""

    def __init__(self, block: Block, parent: Builder, captures: Mapping[int, Item], lineage: Lineage) -> None:
        self.block = block
        self.captures = captures
        self.lineage = lineage
        self.outer = parent.region
        self._code = parent.code
        self.late = tuple(number for number, item in captures.items() if item.state == LATE)
        self._fixed = {number: item for number, item in captures.items() if item.state != LATE}
        self._numbers = (*block.formals, *self.late)
        self._bound: OrderedDict[tuple[Any, ...], _Bound] = OrderedDict()
        self._misses = 0

    def call(self, formals: Sequence[Any], env: dict[int, Any]) -> list[Any]:
        """Run the body; `env` is that of the program around it. The results are the caller's to keep."""
        self._code.stop_if_cancelled()
        given = [*formals, *[env[number] for number in self.late]]
        return self._bind(given).call(given)

    def expected(self, i: int, formals: Sequence[Any], env: dict[int, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """(dtype, shape) of result `i` for these formals, without running: as bound, else as the graph declares it.

        Dimensions that the graph leaves open count as 0, and an unknown rank as none, as in onnxruntime. Raises
        ValueError for what is no tensor.
        """
        item = self._bind([*formals, *[env[number] for number in self.late]]).binding.results[i]
        if item.state != LATE and isinstance(item.value, np.ndarray):
            return item.value.dtype, item.value.shape
        value: Value = self.block.declared[i]
        if not is_tensor(value.dtype):
            raise ValueError(f"{value.name!r} is {value.dtype}: only tensors can be stacked")
        return numpy_dtype(value.dtype), tuple(dim if isinstance(dim, int) else 0 for dim in value.shape or ())

    def tried(self) -> Sequence[Item] | None:
        """Its results as they would be bound now, for a body without formals and late captures.

        None where it cannot be bound: the error is that of a run that chooses it.
        """
        try:
            return self.lineage.bind(dict(self._fixed), self.outer.high).results
        except (KernelError, OutOfMemoryError):
            return None

    def _bind(self, arguments: Sequence[Any]) -> _Bound:
        key: tuple[Any, ...] = tuple((x.dtype.num, x.shape) if fixed_size(x) else None for x in arguments)
        found = self._bound.get(key)
        if found is not None:
            self._bound.move_to_end(key)
            return found
        self._misses += 1
        if self._misses > BINDINGS:  # a signature that keeps changing: bind nothing, once for all
            key = (None,) * len(arguments)
            found = self._bound.get(key)
            if found is not None:
                return found
        given: dict[int, Item | Stage] = dict(self._fixed)
        for number, item, kind in zip(self._numbers, arguments, key, strict=True):
            name = f"{self.block.name}: {self._code.names[number]}"
            given[number] = LATE_ITEM if kind is None else Stage(name, item.dtype, item.shape)
        binding = self.lineage.bind(given, self.outer.high)
        self._bound[key] = found = _Bound(binding, self._numbers)
        if len(self._bound) > BINDINGS:
            self._bound.popitem(last=False)
        return found


def body_in(block: Block, parent: Builder, before: Body | None) -> Body:
    """The body inside the binding that `parent` makes: `before`, inside an earlier binding, if it sees the same."""
    captures = {number: parent.keep(number) for number in block.free}
    if before is None:
        return Body(block, parent, captures, Lineage(parent.code, block, parent.region.scratch, parent.threads))
    if (
        before.outer is parent.region
        and all(before.captures[number] is item for number, item in captures.items())
        and all(op.deterministic for op in block.ops)
    ):
        return before
    return Body(block, parent, captures, before.lineage)


class _Control:
    """What the kinds share: reading the node's inputs, storing its outputs, errors that name it."""

    def __init__(self, op: Op, parent: Builder, before: _Control | None) -> None:
        self.ops = (op,)
        self.op = op
        self.reads = op.reads
        earlier: Mapping[str, Body] = {} if before is None else before.bodies
        self.bodies: dict[str, Body] = {
            key: body_in(block, parent, earlier.get(key)) for key, block in op.bodies.items()
        }
        self._sources = [None if number == ABSENT else parent.keep(number) for number in op.inputs]

    def __call__(self, env: dict[int, Any], binding: Binding) -> None:
        inputs = [
            None if item is None else env[number] if item.state == LATE else item.value
            for item, number in zip(self._sources, self.op.inputs, strict=True)
        ]
        try:
            results = self.execute(inputs, env)
            if len(results) < len(self.op.outputs):
                raise ValueError(f"{len(results)} results for {len(self.op.outputs)} outputs")
        except Exception as cause:
            fail((self.op.origin,), self.op.step.inputs, inputs, cause)
        for number, result in zip(self.op.outputs, results, strict=False):  # results may be more
            if number != ABSENT:
                env[number] = result

    def bindings(self) -> list[Binding]:
        latest = [body.lineage.last for body in self.bodies.values()]
        return [binding for binding in latest if binding is not None]

    def execute(self, inputs: list[Any], env: dict[int, Any]) -> list[Any]:
        """The node's outputs."""
        raise NotImplementedError


class _If(_Control):
    """If-1 to -25: one branch runs; shapes and kinds of the branches' results may differ."""

    def execute(self, inputs: list[Any], env: dict[int, Any]) -> list[Any]:
        chosen = "then_branch" if truth(inputs[0], "the condition") else "else_branch"
        return self.bodies[chosen].call((), env)


class _Branches(Chosen):
    """An If whose branches give results of the same shapes, as a bound step: these are copied to where they belong."""

    def __init__(self, bodies: Mapping[str, Body], condition: np.ndarray, outs: Sequence[np.ndarray | None]) -> None:
        self._bodies, self._condition, self._outs = bodies, condition, tuple(outs)

    def __call__(self) -> None:
        chosen = "then_branch" if truth(self._condition, "the condition") else "else_branch"
        for out, result in zip(self._outs, self._bodies[chosen].call((), {}), strict=True):
            if out is not None:
                np.copyto(out, result)

    def bindings(self) -> list[Binding]:
        latest = [body.lineage.last for body in self._bodies.values()]
        return [binding for binding in latest if binding is not None]


def bound_if(op: Op, parent: Builder, memory: OpMemory) -> Record | None:
    """An If, whose condition is computed in the run, among the bound steps; None where it must be in the stretch.

    Its branches must give results of the same dtypes and shapes, whatever the data are.
    """
    bodies = _If(op, parent, None).bodies
    if any(body.late for body in bodies.values()):
        return None
    ends = [end for end in (body.tried() for body in bodies.values()) if end is not None]
    if not ends:
        return None
    outs: list[np.ndarray | None] = []
    makes: dict[int, Item] = {}
    for items in zip(*ends, strict=False):
        if not all(item.state != LATE and fixed_size(item.value) for item in items):
            return None
        if len({(item.value.dtype, item.value.shape) for item in items}) > 1:
            return None
    for i, number in enumerate(op.outputs):
        if number == ABSENT:
            outs.append(None)
            continue
        like, declared, target = ends[0][i].value, op.step.outputs[i], parent.target(number)
        if target is None:
            out, root = memory.take(declared.name, like.shape, like.dtype)
            makes[number] = Item(FIXED, out, root)
        else:
            out = parent.place(target, declared.dtype, like.shape, like.dtype)
            makes[number] = Item(FIXED, out)
        outs.append(out)
    step = _Branches(bodies, parent.item(op.inputs[0]).value, outs)
    return Record(BOUND, op, op.reads, makes, (step,), taken=tuple(memory.taken))


class _Loop(_Control):
    """Loop-1 to -25. Inputs: trip count or none, condition or none, carried values; outputs: carried values, scans.

    The body's condition counts also where the node has none (as in onnxruntime). Carried values may change shape.
    """

    def execute(self, inputs: list[Any], env: dict[int, Any]) -> list[Any]:
        body = self.bodies["body"]
        block = body.block
        count = len(block.formals) - 2
        inputs += [None] * (2 + count - len(inputs))
        trips = None if inputs[0] is None else int(single(inputs[0], "the trip count"))
        going = True if inputs[1] is None else truth(inputs[1], "the condition")
        carried = inputs[2 : 2 + count]
        scans = _Stacks(len(block.results) - 1 - count)
        trip = 0
        condition = np.array(going)
        while going and (trips is None or trip < trips):
            results = body.call([np.array(trip, np.int64), condition, *carried], env)
            condition = results[0]
            going = truth(condition, "the body's condition")
            carried = results[1 : 1 + count]
            scans.add(results[1 + count :])
            trip += 1
        if trip:
            return [*carried, *(scans.stacked(i) for i in range(scans.count))]
        formals = [np.array(0, np.int64), condition, *carried]
        empty = [body.expected(1 + count + i, formals, env) for i in range(scans.count)]
        return [*carried, *(np.empty((0, *shape), dtype) for dtype, shape in empty)]


class _Scan(_Control):
    """Scan-8 to -25. Inputs: states, then scan inputs, sliced along their axes; outputs: states, then stacked scans.

    Scan-8 has a leading batch axis everywhere, and before the states the lengths of the sequences, if they differ.
    """

    def execute(self, inputs: list[Any], env: dict[int, Any]) -> list[Any]:
        if self.op.step.opset >= 9:
            return self._scan(inputs, env)
        lengths, *rest = inputs
        sequences = rest[len(rest) - self.op.step.attributes["num_scan_inputs"] :]
        states = rest[: len(rest) - len(sequences)]
        batches = []
        for at in range(len(sequences[0])):
            stop = None if lengths is None else int(lengths[at])
            batches.append(self._scan([*(s[at] for s in states), *(x[at][:stop] for x in sequences)], env))
        return [_padded(items) for items in zip(*batches, strict=True)]

    def _scan(self, inputs: list[Any], env: dict[int, Any]) -> list[Any]:
        body = self.bodies["body"]
        attributes = self.op.step.attributes
        sliced = attributes["num_scan_inputs"]
        states, xs = inputs[: len(inputs) - sliced], inputs[len(inputs) - sliced :]
        count = len(states)
        scans = _Stacks(len(body.block.results) - count)
        axes = _list(attributes, "scan_input_axes", sliced)
        directions = "scan_input_directions" if self.op.step.opset >= 9 else "directions"
        backward = _directions(attributes, directions, sliced)
        out_axes = _list(attributes, "scan_output_axes", scans.count)
        out_backward = _directions(attributes, "scan_output_directions", scans.count)
        moved = []
        for i, (x, axis) in enumerate(zip(xs, axes, strict=True)):
            if not -x.ndim <= axis < x.ndim:
                raise ValueError(f"scan_input_axes[{i}] is {axis}, the input has {x.ndim} dimensions")
            rolled = np.moveaxis(x, axis, 0)
            moved.append(rolled[::-1] if backward[i] else rolled)
        lengths = {len(x) for x in moved}
        if len(lengths) != 1:
            raise ValueError(f"the scan inputs have different lengths, {[len(x) for x in moved]}")
        trips = lengths.pop()
        for trip in range(trips):
            results = body.call([*states, *(np.asarray(x[trip]) for x in moved)], env)
            states = results[:count]
            scans.add(results[count:])
        if trips:
            stacked = [scans.stacked(i) for i in range(scans.count)]
        else:
            formals = [*states, *(np.empty(x.shape[1:], x.dtype) for x in moved)]
            empty = [body.expected(count + i, formals, env) for i in range(scans.count)]
            stacked = [np.empty((0, *shape), dtype) for dtype, shape in empty]
        outputs = list(states)
        for i, y in enumerate(stacked):
            axis = out_axes[i]
            if not -y.ndim <= axis < y.ndim:
                raise ValueError(f"scan_output_axes[{i}] is {axis}, the output has {y.ndim} dimensions")
            outputs.append(np.ascontiguousarray(np.moveaxis(y[::-1] if out_backward[i] else y, 0, axis)))
        return outputs


class _SequenceMap(_Control):
    """SequenceMap-17: the body for each element of the first sequence; further inputs are sequences or tensors."""

    def execute(self, inputs: list[Any], env: dict[int, Any]) -> list[Any]:
        body = self.bodies["body"]
        length = len(inputs[0])
        for i, item in enumerate(inputs):
            if isinstance(item, list) and len(item) != length:
                raise ValueError(f"sequence {i} has {len(item)} elements, the first one {length}")
        outputs: list[list[Any]] = [[] for _ in body.block.results]
        for at in range(length):
            results = body.call([item[at] if isinstance(item, list) else item for item in inputs], env)
            for output, result in zip(outputs, results, strict=True):
                output.append(result)
        return outputs


_KINDS: dict[str, Callable[[Op, Builder, _Control | None], _Control]] = {
    "If": _If,
    "Loop": _Loop,
    "Scan": _Scan,
    "SequenceMap": _SequenceMap,
}


class _Stacks:
    """The scan outputs of a node as they grow, one element per iteration."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._items: list[list[np.ndarray]] = [[] for _ in range(count)]

    def add(self, results: Sequence[Any]) -> None:
        for i, result in enumerate(results):
            items = self._items[i]
            if items and (items[0].shape != result.shape or items[0].dtype != result.dtype):
                raise ValueError(
                    f"scan output {i} was {items[0].dtype}{list(items[0].shape)} at first and is "
                    f"{result.dtype}{list(result.shape)} in iteration {len(items)}"
                )
            items.append(result)

    def stacked(self, i: int) -> np.ndarray:
        """Elements of scan output `i` along a new first axis."""
        return np.stack(self._items[i])


def _padded(items: Sequence[np.ndarray]) -> np.ndarray:
    """The items along a new first axis, shorter ones filled up with zeros at the end of their first axis."""
    if items[0].ndim == 0:
        return np.stack(items)
    longest = max(items, key=lambda item: item.shape[:1])
    result = np.zeros((len(items), *longest.shape), longest.dtype)
    for place, item in zip(result, items, strict=True):
        place[: len(item)] = item
    return result


def _list(attributes: Any, name: str, count: int) -> list[int]:
    values = list(attributes.get(name, [0] * count))
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} scans")
    return values


def _directions(attributes: Any, name: str, count: int) -> list[int]:
    values = _list(attributes, name, count)
    for i, value in enumerate(values):
        if value not in (0, 1):
            raise ValueError(f"{name}[{i}] is {value}, it must be 0 (forward) or 1 (backward)")
    return values
