"""A block while its ops are fused: who makes and who reads each value, what is constant, and one op put for several.

Values are numbers, as in `blocks.py`. A fused op takes the place of the last of the ops that it stands for, so all it
reads is there; it writes the value that this op wrote. What others read too is never taken away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outrider.providers.contract import Node, Value
from outrider.providers.cpu.blocks import ABSENT, Block, Code, Op
from outrider.providers.cpu.claims import OWN
from outrider.providers.cpu.fusion.shapes import Inference, merged
from outrider.providers.cpu.items import LATE_ITEM, Item
from outrider.providers.cpu.kernels.frame import Unsupported, find
from outrider.providers.cpu.modes import immediate
from outrider.shm.errors import OutriderError

OPSET = 24  # of the ops of ai.onnx that are put for others
SMALL = 64  # elements; contents of larger constants are not looked at while patterns are matched


class Draft:
    """The ops of one block. `counts`: how many ops each pattern made."""

    def __init__(self, code: Code, block: Block, counts: Counter[str]) -> None:
        self.counts = counts
        self._code = code
        self._block = block
        self._slots: list[Op | None] = list(block.ops)
        self._at = {op: i for i, op in enumerate(block.ops)}
        self._results = set(block.results)
        self._makers: dict[int, Op] = {}
        self._readers: dict[int, list[Op]] = {}
        self._values: dict[int, Value] = {}
        for op in block.ops:
            self._enter(op)

    def _enter(self, op: Op) -> None:
        for number, value in zip(op.inputs, op.step.inputs, strict=True):
            self._values.setdefault(number, value)
        for number in op.reads:
            self._readers.setdefault(number, []).append(op)
        for number, value in zip(op.outputs, op.step.outputs, strict=True):
            if number != ABSENT:
                self._makers[number] = op
                self._values.setdefault(number, value)

    def _leave(self, op: Op) -> None:
        self._slots[self._at.pop(op)] = None
        for number in op.reads:
            self._readers[number].remove(op)
        for number in op.outputs:
            self._makers.pop(number, None)

    # Looking ---------------------------------------------------------------------------------------------------------
    @property
    def ops(self) -> list[Op]:
        """The ops that are there now, in order."""
        return [op for op in self._slots if op is not None]

    def ordered(self, ops: Iterable[Op]) -> list[Op]:
        """These ops, in order."""
        return sorted(ops, key=self._at.__getitem__)

    def has(self, op: Op) -> bool:
        """False for an op that another one stands for by now."""
        return op in self._at

    def maker(self, number: int, *types: str) -> Op | None:
        """The op of ai.onnx that makes a value, if it is of one of these types; of any if none is given."""
        op = self._makers.get(number)
        return op if op is not None and op.step.domain == "" and (not types or op.step.op_type in types) else None

    def inner(self, number: int, *types: str) -> Op | None:
        """`maker`, if its value is read in one place only."""
        return self.maker(number, *types) if self.reads(number) == 1 else None

    def own(self, number: int, *types: str) -> Op | None:
        """The op of the domain `outrider` that makes a value, of one of these types."""
        op = self._makers.get(number)
        return op if op is not None and op.step.domain == OWN and op.step.op_type in types else None

    def reads(self, number: int) -> int:
        """How often a value is read; results of the block count."""
        return len(self._readers.get(number, ())) + (number in self._results)

    def readers(self, number: int) -> Sequence[Op]:
        """The ops that read a value, or whose bodies do, once per reading."""
        return tuple(self._readers.get(number, ()))

    def reader(self, number: int) -> Op | None:
        """The op that alone reads a value, once."""
        return self._readers[number][0] if self.reads(number) == 1 and self._readers.get(number) else None

    def closed(self, ops: Iterable[Op], output: int) -> bool:
        """True if nobody but these ops reads what they make, apart from `output`."""
        members = set(ops)
        made = {number for op in members for number in op.outputs if number not in (output, ABSENT)}
        return self._results.isdisjoint(made) and all(
            reader in members for number in made for reader in self._readers.get(number, ())
        )

    def dtype(self, number: int) -> str:
        """The ONNX name of a value's dtype."""
        return self._values[number].dtype

    def shape(self, number: int) -> tuple[Any, ...] | None:
        """The shape as declared; None for an unknown rank. That of a constant is known."""
        shape = self._values[number].shape
        if self.is_constant(number) and (shape is None or not all(isinstance(dim, int) for dim in shape)):
            value = self._contents(number)
            return value.shape if isinstance(value, np.ndarray) else None
        return shape

    def rank(self, number: int) -> int | None:
        """The number of axes, None where it is not declared."""
        shape = self.shape(number)
        return None if shape is None else len(shape)

    # Constants -------------------------------------------------------------------------------------------------------
    def is_constant(self, number: int) -> bool:
        """True for constants, and for what is made of such only."""
        return self._code.is_constant(number)

    def value(self, number: int) -> Any:
        """The contents of a constant."""
        return self._code.constant(number).value

    def small(self, number: int) -> np.ndarray | None:
        """The contents of a constant of few elements, None for anything else."""
        if number == ABSENT or not self.is_constant(number):
            return None
        shape = self.shape(number)
        if shape is None or np.prod(shape, dtype=np.int64) > SMALL:
            return None
        value = self._contents(number)
        return value if isinstance(value, np.ndarray) and not value.dtype.hasobject else None

    def _contents(self, number: int) -> Any:
        """The contents of a constant; None where it cannot be made, which is said when it is used."""
        try:
            return self.value(number)
        except OutriderError:
            return None

    def scalar(self, number: int) -> float | None:
        """The number that a constant of one element is, None for anything else."""
        value = self.small(number)
        return float(value.reshape(())[()]) if value is not None and value.size == 1 else None

    def ints(self, number: int) -> list[int] | None:
        """The elements of a small constant of integers, None for anything else."""
        value = self.small(number)
        return [int(one) for one in value.ravel()] if value is not None and value.dtype.kind in "iu" else None

    def derived(
        self, name: str, shape: Sequence[int], make: Callable[..., np.ndarray], *numbers: int, dtype: Any = np.float32
    ) -> int:
        """A new constant: `make` of the contents of others, called when it is first asked for."""
        number = self._code.derived(name, partial(self._derive, tuple(shape), np.dtype(dtype), make, numbers))
        self._values[number] = Value(name, np.dtype(dtype).name, tuple(shape), constant=True)
        return number

    def _derive(
        self, shape: tuple[int, ...], dtype: Any, make: Callable[..., np.ndarray], numbers: Sequence[int]
    ) -> np.ndarray:
        with np.errstate(all="ignore"):
            array = np.array(make(*[self.value(number) for number in numbers]), dtype, order="C")
        array = np.broadcast_to(array, shape).copy() if array.shape != shape else array
        array.flags.writeable = False
        return array

    def through(self, op: Op, source: int, table: int) -> int:
        """The constant that an elementwise op makes of `table` in the place of `source`, in the shape of the table."""
        around = _Around(self._code)

        def made() -> np.ndarray:
            numbers = [table if number == source else number for number in op.inputs]
            given = [None if number == ABSENT else self.value(number) for number in numbers]
            with np.errstate(all="ignore"):
                result: np.ndarray = immediate(op, given, around)[0]
            return result.reshape(self.shape(table) or ())

        return self.derived(f"{op.origin.name} of a table", self.shape(table) or (), made)

    def infer(self) -> None:
        """Complete what is declared of shapes; constants are known by then."""
        inference = Inference(self.shape, self.ints, self._makers.get)
        for op in self.ops:
            number = op.outputs[0] if op.outputs else ABSENT
            declared = None if number == ABSENT else self._values[number]
            if declared is not None and (declared.shape is None or None in declared.shape):
                shape = merged(declared.shape, inference.output(op))
                self._values[number] = replace(declared, shape=shape)

    # Changing --------------------------------------------------------------------------------------------------------
    def fold(self, op: Op) -> None:
        """The outputs of an op whose inputs are constants are constants; it is executed when one is asked for."""
        self._leave(op)
        around = _Around(self._code)
        for i, number in enumerate(op.outputs):
            if number != ABSENT:
                self._code.known(number, partial(_folded, op, i, around))

    def replace(
        self,
        pattern: str,
        ops: Sequence[Op],
        op_type: str,
        inputs: Sequence[int],
        attributes: Mapping[str, Any] | None = None,
        domain: str = OWN,
        title: str = "",
    ) -> Op | None:
        """Put one op for several, of which the first is the main one: errors and traces name it.

        `title`: what they are together, the names of all if it is not given. None, with nothing changed, where others
        read what these ops make in between, or where the kernel does not take it.
        """
        last = max(ops, key=self._at.__getitem__)
        output = last.outputs[0]
        if not self.closed(ops, output):
            return None
        return self._put(pattern, ops, last, op_type, inputs, attributes or {}, domain, title)

    def _put(
        self,
        pattern: str,
        ops: Sequence[Op],
        last: Op,
        op_type: str,
        inputs: Sequence[int],
        attributes: Mapping[str, Any],
        domain: str,
        title: str,
    ) -> Op | None:
        main = ops[0]
        numbers = list(inputs)
        while numbers and numbers[-1] == ABSENT:
            numbers.pop()
        step = Node(
            index=main.origin.index, name=main.origin.name, op_type=op_type, domain=domain,
            opset=1 if domain == OWN else OPSET, attributes=dict(attributes),
            inputs=tuple(Value("") if number == ABSENT else self._values[number] for number in numbers),
            outputs=last.step.outputs[:1],
        )  # fmt: skip
        try:
            kernel = find(step)
            parsed = kernel.parsed(step)
        except Unsupported:
            return None  # what the kernel does not take stays as it was
        others = {id(node): node for op in ops for node in (op.origin, *op.fused) if node is not main.origin}
        prefix = main.label.partition("::")[0]
        names = title or "+".join(dict.fromkeys(op.label.partition("::")[2] for op in ops))
        made = Op(
            step, main.origin, kernel, parsed, False, tuple(numbers), last.outputs[:1], {}, kernel.deterministic,
            fused=tuple(others.values()), title=f"{prefix}::{names}",
        )  # fmt: skip
        made.note_reads()
        at = self._at[last]
        for op in ops:
            self._leave(op)
        self._slots[at] = made
        self._at[made] = at
        self._enter(made)
        if pattern:
            self.counts[pattern] += 1
        return made

    def bypass(self, pattern: str, op: Op, source: int) -> bool:
        """Leave an op out whose first output is `source`.

        Who read the output reads the source. If the output is a result, the maker of the source makes it instead.
        False, with nothing changed, where neither can be: no op here makes the source, it is a result too, or bodies
        read it.
        """
        output = op.outputs[0]
        if output in self._results:
            return self._take_over(pattern, op, source)
        if not self._let_read(output, source):
            return False
        self._leave(op)
        self.counts[pattern] += 1
        return True

    def _let_read(self, output: int, source: int) -> bool:
        """Let those who read `output` read `source` instead; False where bodies are among them."""
        readers = set(self._readers.get(output, []))
        if any(output in reader.captures for reader in readers):
            return False
        for reader in readers:
            self.rewire(reader, [source if number == output else number for number in reader.inputs])
        return True

    def _take_over(self, pattern: str, op: Op, source: int) -> bool:
        """Let the maker of `source` make the output of `op`, which is a result."""
        maker, output = self._makers.get(source), op.outputs[0]
        if maker is None or source in self._results:
            return False
        if any(source in reader.captures for reader in self._readers[source]):
            return False
        self._leave(op)
        self._let_read(source, output)
        value = self._values[output]
        value = self._values[output] = replace(value, shape=merged(value.shape, self._values[source].shape))
        maker.outputs = tuple(output if number == source else number for number in maker.outputs)
        outputs = zip(maker.outputs, maker.step.outputs, strict=True)
        maker.step = replace(maker.step, outputs=tuple(value if n == output else one for n, one in outputs))
        self._makers[output] = maker
        del self._makers[source]
        self.counts[pattern] += 1
        return True

    def exchange(self, view: Op, op: Op, inputs: Sequence[int]) -> None:
        """Let `op`, which alone reads what `view` makes, run before it, with other inputs."""
        source, final = view.inputs[0], op.outputs[0]
        places = self._at[view], self._at[op]
        self._leave(view)
        self._leave(op)
        between = self._code.fresh(f"{self._values[final].name} before {view.origin.name}")
        self._values[between] = replace(
            self._values[final], name=self._code.names[between], shape=self._values[source].shape
        )
        for one, given, output, at in (
            (op, inputs, between, places[0]),
            (view, (between, *view.inputs[1:]), final, places[1]),
        ):
            one.inputs, one.outputs = tuple(given), (output,)
            values = [Value("") if number == ABSENT else self._values[number] for number in given]
            one.step = replace(one.step, inputs=tuple(values), outputs=(self._values[output],))
            one.note_reads()
            self._slots[at], self._at[one] = one, at
            self._enter(one)

    def rewire(self, op: Op, inputs: Sequence[int]) -> None:
        """Give an op other inputs, of the same dtypes."""
        for number in op.reads:
            self._readers[number].remove(op)
        op.inputs = tuple(inputs)
        values = [Value("") if number == ABSENT else self._values[number] for number in inputs]
        op.step = replace(op.step, inputs=tuple(values))
        op.note_reads()
        for number in op.reads:
            self._readers.setdefault(number, []).append(op)

    def sweep(self) -> None:
        """Take away ops whose outputs nobody reads any more."""
        for op in reversed(self.ops):
            if op.kernel is not None and op.deterministic and not any(self.reads(n) for n in op.outputs):
                self._leave(op)

    def finish(self) -> None:
        """The block has the ops of the draft."""
        self.sweep()
        self._block.ops = self.ops
        self._block.note_uses(self._code.is_constant)


class _Around:
    """What an op sees that is executed at compile time (`modes.Surroundings`)."""

    threads = 1

    def __init__(self, code: Code) -> None:
        self.code = code

    def item(self, number: int) -> Item:
        return self.code.constant(number) if self.code.is_constant(number) else LATE_ITEM


def _folded(op: Op, i: int, around: _Around) -> Any:
    """Output `i` of an op whose inputs are constants."""
    code = around.code
    results = code.folded.get(op)
    if results is None:
        given = [None if number == ABSENT else code.constant(number).value for number in op.inputs]
        with np.errstate(all="ignore"):
            results = code.folded[op] = immediate(op, given, around)
        for result in results:
            if isinstance(result, np.ndarray):
                result.flags.writeable = False
    return results[i]
