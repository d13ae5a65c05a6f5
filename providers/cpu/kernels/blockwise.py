"""Element-wise programs on float32 by the compiled library: one pass over memory, block by block.

Truth values are 1 and 0 in a program; inputs may be bool (and integers, which lose what float32 cannot hold), the
output may be bool.

A program is a list of instructions `(name, operand, ...)` with a name of INSTRUCTIONS; operand k is input k where k is
below the number of inputs, else the result of instruction k - inputs. The last instruction makes the output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, order_of
from outrider.providers.cpu.native import Library

Program = Sequence[tuple[str | int, ...]]

# name -> (operands, nanoseconds per element on one thread); numbered as in `source/elementwise.c`.
INSTRUCTIONS: dict[str, tuple[int, float]] = {
    "Add": (2, 0.15), "Sub": (2, 0.15), "Mul": (2, 0.15), "Div": (2, 0.2), "Pow": (2, 5.0), "Min": (2, 0.2),
    "Max": (2, 0.2), "Neg": (1, 0.15), "Abs": (1, 0.15), "Sqrt": (1, 0.35), "Rsqrt": (1, 0.5), "Exp": (1, 0.5),
    "Log": (1, 0.9), "Tanh": (1, 0.5), "Erf": (1, 0.6), "Sigmoid": (1, 0.6), "Relu": (1, 0.15), "LeakyRelu": (2, 0.2),
    "HardSigmoid": (3, 0.2), "HardSwish": (1, 0.2), "Reciprocal": (1, 0.2), "Floor": (1, 0.15), "Ceil": (1, 0.15),
    "Round": (1, 0.15), "Clip": (3, 0.2), "Softplus": (1, 1.8), "Silu": (1, 0.7), "Gelu": (1, 0.7),
    "GeluTanh": (1, 0.6), "Elu": (2, 0.8), "Softsign": (1, 0.2), "Mish": (1, 2.3), "ThresholdedRelu": (2, 0.2),
    "Sign": (1, 0.2), "Less": (2, 0.2), "LessOrEqual": (2, 0.2), "Greater": (2, 0.2), "GreaterOrEqual": (2, 0.2),
    "Equal": (2, 0.2), "Where": (3, 0.2), "Swish": (2, 0.7), "Selu": (3, 0.8), "Celu": (2, 0.9), "Copy": (1, 0.15),
    "MulAdd": (3, 0.2), "NotEqual": (2, 0.2),
}  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(INSTRUCTIONS)}
MOST_INPUTS, _AXES, _BLOCK = 16, 8, 1024  # INPUTS, AXES, BLOCK in C
_TYPES = {np.dtype(name): number for number, name in enumerate(("float32", "bool", "int32", "int64"))}  # as in C
_BYTE = np.dtype(np.uint8)  # as bool
_DENSE, _PATTERN, _EVEN, _GATHERED = range(4)


@dataclass(frozen=True)
class Walk:
    """The axes of the output, joined, and each input's strides along them, in elements."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def walk(y: np.ndarray, inputs: Sequence[np.ndarray]) -> Walk:
    """The axes of y by falling stride; neighbours that lie alike in y (dense) and every input are one."""
    spread = [np.broadcast_to(x, y.shape).strides for x in inputs]
    axes = [axis for axis in sorted(range(y.ndim), key=lambda axis: -y.strides[axis]) if y.shape[axis] != 1]
    shape: list[int] = []
    strides: list[list[int]] = [[] for _ in inputs]
    for axis in axes:
        n = y.shape[axis]
        steps = [s[axis] // x.itemsize for s, x in zip(spread, inputs, strict=True)]
        if shape and all(row[-1] == step * n for row, step in zip(strides, steps, strict=True)):
            shape[-1] *= n
            for row, step in zip(strides, steps, strict=True):
                row[-1] = step
        else:
            shape.append(n)
            for row, step in zip(strides, steps, strict=True):
                row.append(step)
    if not shape:
        return Walk((1,), tuple((0,) for _ in inputs))
    return Walk(tuple(shape), tuple(tuple(row) for row in strides))


def _kind(x: Sequence[int], dense: Sequence[int], rows: int) -> int:
    if tuple(x) == tuple(dense):
        return _DENSE
    if not any(x[:-1] if rows else x):
        return _PATTERN
    return _EVEN if not rows and x[-1] == 0 else _GATHERED


def _assigned(program: Program, inputs: int, blocks: int) -> tuple[list[int], int]:
    """The scratch block of each instruction's result (-1: the output), after `blocks`; and how many there are then."""
    last: dict[int, int] = {}
    for i, (_, *operands) in enumerate(program):
        for k in operands:
            last[int(k)] = i
    free: list[int] = []
    results: list[int] = []
    for i, (_, *operands) in enumerate(program):
        for k in {int(k) for k in operands}:
            if k >= inputs and last[k] == i:
                free.append(results[k - inputs])  # an instruction may write over what it reads
        if i == len(program) - 1:
            results.append(-1)
        elif free:
            results.append(free.pop())
        else:
            results.append(blocks)
            blocks += 1
        if i < len(program) - 1 and inputs + i not in last:
            raise ValueError(f"nothing reads instruction {i} of {list(program)}")
    return results, blocks


def _combined(program: Program, inputs: int) -> Program:
    """The program with a product that only a sum reads and that sum as one instruction."""
    readers = Counter(int(k) for _, *operands in program for k in operands)
    taken: set[int] = set()  # products that are part of a sum
    made: list[tuple[str | int, ...]] = []
    for name, *operands in program:
        numbers = [int(k) for k in operands]
        product = next(
            (k for k in numbers if k >= inputs and program[k - inputs][0] == "Mul" and readers[k] == 1), None
        )
        if name == "Add" and product is not None:
            taken.add(product)
            other = numbers[1] if numbers[0] == product else numbers[0]
            made.append(("MulAdd", *program[product - inputs][1:], other))
        else:
            made.append((name, *numbers))
    kept = [i for i in range(len(program)) if inputs + i not in taken]
    renamed = {inputs + old: inputs + new for new, old in enumerate(kept)}
    return [(made[i][0], *(renamed.get(int(k), int(k)) for k in made[i][1:])) for i in kept]


def _plan(program: Program, where: Walk, types: Sequence[int], truths: bool) -> tuple[np.ndarray, int, int]:
    """`struct plan` of C, the number of scratch blocks, and how many blocks of the output there are.

    `types`: those of the inputs, as in C; `truths`: the output is bool.
    """
    width = where.shape[-1]
    rows = _BLOCK // width if width <= _BLOCK else 0
    total, count = math.prod(where.shape), math.prod(where.shape[:-1])
    dense = [math.prod(where.shape[axis + 1 :]) for axis in range(len(where.shape))]
    kinds = [_kind(strides, dense, rows) for strides in where.strides]
    kinds = [_GATHERED if kind == _DENSE and type_ else kind for kind, type_ in zip(kinds, types, strict=True)]
    results, blocks = _assigned(program, len(kinds), sum(kind != _DENSE for kind in kinds))
    if truths:
        results[-1] = blocks
        blocks += 1
    most = min(total, rows * width if rows else _BLOCK)
    words = [len(where.shape), *_padded(where.shape), rows, _BLOCK, most, len(kinds), blocks, len(program)]
    words.append(results[-1])  # -1 where it is the output itself
    inputs, own = len(kinds), 0
    for type_, kind, strides in zip(types, kinds, where.strides, strict=True):
        words += [type_, kind, own, *_padded(strides)]
        own += kind != _DENSE
    words += [0] * ((MOST_INPUTS - inputs) * (3 + _AXES))
    for (name, *operands), result in zip(program, results, strict=True):
        places = [int(k) if int(k) < inputs else MOST_INPUTS + results[int(k) - inputs] for k in operands]
        words += [_NUMBERS[str(name)], *places, *[0] * (3 - len(places)), result]
    return np.array(words, np.int64), blocks, -(-count // rows) if rows else count * -(-width // _BLOCK)


def _padded(numbers: Sequence[int]) -> list[int]:
    return [*numbers, *[0] * (_AXES - len(numbers))]


def takes(shape: Sequence[int], inputs: Sequence[np.ndarray], truths: bool = False) -> bool:
    """True where C takes these inputs: not too many, all float32 (or bool, with `truths`), not too many axes even if
    none can be joined."""
    axes = sum(n != 1 for n in shape)
    if len(inputs) > MOST_INPUTS or axes > _AXES:
        return False
    return all(x.dtype == np.float32 or (truths and x.dtype == np.bool_) for x in inputs)


def reads(x: np.ndarray) -> bool:
    """True where C can turn x into float32: bool, uint8, int32, int64; and float32 itself."""
    return x.dtype in _TYPES or x.dtype == _BYTE


def blockwise(
    b: Bind, library: Library, program: Program, inputs: Sequence[np.ndarray], given: int, dtype: Any = np.float32
) -> None:
    """Record output 0 = program(inputs), of the shape they broadcast to, in the memory order of a whole one.

    The first `given` of the inputs (`takes` them) are the node's; one of them may give its memory. `dtype`: float32 or
    bool.
    """
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    whole = [i for i, x in enumerate(inputs) if x.shape == shape and i < given]
    first = next((i for i in whole if order_of(inputs[i]) is not None), whole[0] if whole else None)
    order = None if first is None else order_of(inputs[first])
    alike = next((i for i in whole if inputs[i].dtype == dtype and order_of(inputs[i]) == order), None)
    y = b.out(0, shape, dtype, order) if alike is None else b.reuse(0, alike)
    if not y.size:
        return
    lies = (y if order is None else y.transpose(order)).flags.c_contiguous
    to = y if lies else b.scratch(shape, dtype, order)
    into(b, library, program, inputs, to)
    if to is not y:
        b.copy(y, to)


def into(b: Bind, library: Library, program: Program, inputs: Sequence[np.ndarray], y: np.ndarray) -> None:
    """Record program(inputs) -> y, whose memory is dense and may be that of an input of its dtype that lies like it."""
    if not y.size:
        return
    order = order_of(y)
    program = _combined(program, len(inputs))
    aligned = [b.contiguous(x, order) if x.shape == y.shape else x for x in inputs]
    types = [1 if x.dtype == _BYTE else _TYPES[x.dtype] for x in aligned]
    plan, blocks, count = _plan(program, walk(y, aligned), types, y.dtype == np.bool_)
    scratch = b.scratch((library.threads, blocks, _BLOCK), np.float32) if blocks else None
    cost = y.size * sum(INSTRUCTIONS[str(name)][1] for name, *_ in program)
    tasks = library.tasks(count, cost, 4)
    rest = [None] * (MOST_INPUTS - len(aligned))
    b.step(library.call("or_elementwise", tasks, y, scratch, plan, tasks, *aligned, *rest))


def scalar_operand(value: float) -> np.ndarray:
    """A parameter of an instruction as the input it is there."""
    return np.array(value, np.float32)
