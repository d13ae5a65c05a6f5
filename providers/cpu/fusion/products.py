"""What is done to the operands of a matrix product, into the product. Within tolerance.

    Transpose of the last two axes -> MatMul          transA, transB
    Mul or Div by a number -> MatMul                  factor
    x == 0, 1, 2, ... -> Cast -> MatMul by constants  outrider::Lookup, a row of the constants (`kernels/lookup.py`)
    Lookup -> elementwise with constants              a table of other rows

The exporter of torch transposes keys by Reshape to three axes, Transpose, and Reshape back; that is a Transpose, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.claims import OWN
from outrider.providers.cpu.fusion.chains import joins
from outrider.providers.cpu.fusion.cleaning import permutation
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import keeps_rank

LARGEST = 1 << 20  # elements of a table whose contents are looked at


def fuse_lookups(draft: Draft) -> None:
    """One-hot rows times a constant matrix."""
    for op in draft.ops:
        if op.step.domain == "" and op.step.op_type == "MatMul" and op.step.outputs[0].dtype == "float32":
            _lookup(draft, op)


def _lookup(draft: Draft, op: Op) -> None:
    cast = draft.inner(op.inputs[0], "Cast")
    equal = None if cast is None else draft.inner(cast.inputs[0], "Equal")
    table = draft.shape(op.inputs[1])
    if cast is None or equal is None or not draft.is_constant(op.inputs[1]) or table is None or len(table) != 2:
        return
    for x, numbers in (equal.inputs, equal.inputs[::-1]):
        shape, given = draft.shape(x), draft.shape(numbers)
        if draft.is_constant(x) or not draft.is_constant(numbers) or shape is None or given is None:
            continue
        if (
            len(shape) < len(given)
            or not shape
            or shape[-1] != 1
            or given[-1] != table[0]
            or np.prod(given) != table[0]
        ):
            continue
        counted = np.array_equal(np.ravel(draft.value(numbers)), np.arange(table[0]))
        if draft.dtype(x) not in ("int32", "int64") or not counted or table[0] * table[1] > LARGEST:
            continue
        if np.isfinite(draft.value(op.inputs[1])).all():  # 0 times infinity would be NaN
            framed = draft.derived("a table", (table[0] + 2, table[1]), _framed, op.inputs[1])
            draft.replace("lookup", [op, cast, equal], "Lookup", [x, framed])
            return


def _framed(table: np.ndarray) -> np.ndarray:
    """The table between two rows of zeros, for numbers below and above."""
    return np.pad(table, ((1, 1), (0, 0)))


def fuse_tables(draft: Draft) -> None:
    """What is done to each row that is looked up is done to the table, once. Bit-equal."""
    for op in draft.ops:
        while op.step.op_type == "Lookup" and op.step.domain == OWN:
            after = draft.reader(op.outputs[0])
            if after is None or not joins(after) or not _by_row(draft, after, op.outputs[0]):
                break
            table = draft.through(after, op.outputs[0], op.inputs[1])
            made = draft.replace("lookup", [op, after], "Lookup", [op.inputs[0], table])
            if made is None:
                break
            op = made


def _by_row(draft: Draft, op: Op, x: int) -> bool:
    """True for an operator whose other operands are constants, the same for every row of `x`."""
    others = [number for number in op.inputs if number not in (x, ABSENT)]
    rank = draft.rank(x)
    shapes = [draft.shape(number) if draft.is_constant(number) else None for number in others]
    return rank is not None and all(
        shape is not None and len(shape) <= rank and all(dim == 1 for dim in shape[:-1]) for shape in shapes
    )


def fuse_operands(draft: Draft) -> None:
    """Transposes and factors of MatMul."""
    for op in draft.ops:
        if op.step.domain == "" and op.step.op_type == "Reshape":
            _transposed(draft, op)
    for op in draft.ops:
        if op.step.domain == "" and op.step.op_type == "MatMul" and op.step.outputs[0].dtype == "float32":
            _operands(draft, op)


def _operands(draft: Draft, op: Op) -> None:
    if draft.is_constant(op.inputs[0]):
        return
    attributes: dict[str, Any] = {"factor": 1.0}
    inputs, ops = list(op.inputs), [op]
    for i, name in enumerate(("transA", "transB")):
        while not draft.is_constant(inputs[i]):
            inner = draft.inner(inputs[i], "Mul", "Div", "Transpose")
            if inner is None:
                break
            if inner.step.op_type == "Transpose":
                if not swaps_last(permutation(draft, inner)):
                    break
                attributes[name] = 1 - attributes.get(name, 0)
                inputs[i] = inner.inputs[0]
            else:
                constants = [draft.scalar(number) for number in inner.inputs]
                at = 1 if constants[1] is not None else 0
                factor = constants[at]
                if factor is None or (inner.step.op_type == "Div" and (at == 0 or factor == 0)):
                    break
                if not keeps_rank(draft, [inner], inner.inputs[1 - at]):
                    break
                attributes["factor"] *= factor if inner.step.op_type == "Mul" else 1 / factor
                inputs[i] = inner.inputs[1 - at]
            ops.append(inner)
    if len(ops) > 1:
        draft.replace("matmul+operands", ops, "MatMul", inputs, attributes)


def swaps_last(perm: list[int] | None) -> bool:
    """True for a permutation that swaps the last two axes and leaves the others."""
    rank = len(perm or ())
    return perm is not None and rank > 1 and perm == [*range(rank - 2), rank - 1, rank - 2]


def _transposed(draft: Draft, op: Op) -> None:
    """Reshape(Transpose(Reshape(x, [-1, m, n])), [..., n, m]), its shapes taken from Shape(x)."""
    turn = draft.inner(op.inputs[0], "Transpose")
    before = None if turn is None else draft.inner(turn.inputs[0], "Reshape")
    if turn is None or before is None or permutation(draft, turn) != [0, 2, 1]:
        return
    x = before.inputs[0]
    rank = draft.rank(x)
    flat, full = _dims(draft, before.inputs[1], x), _dims(draft, op.inputs[1], x)
    if rank is None or rank < 3 or flat is None or full is None:
        return
    last = [rank - 2, rank - 1]
    if flat != [None, *last] or full != [*range(rank - 2), *last[::-1]]:
        return
    perm = [*range(rank - 2), rank - 1, rank - 2]
    draft.replace("transposed keys", [op, turn, before], "Transpose", [x], {"perm": perm}, domain="", title="Transpose")


def _dims(draft: Draft, number: int, x: int) -> list[int | None] | None:
    """A shape as axes of `x`, None standing for -1; None where it is another."""
    op = draft.maker(number, "Concat")
    rank = draft.rank(x)
    if op is None or rank is None:
        return None
    axes: list[int | None] = []
    for part in op.inputs:
        if draft.is_constant(part):
            if draft.ints(part) != [-1]:
                return None
            axes.append(None)
            continue
        taken = draft.maker(part, "Slice")
        shape = None if taken is None else draft.maker(taken.inputs[0], "Shape")
        if taken is None or shape is None or shape.inputs[0] != x or shape.step.attributes.get("start", 0):
            return None
        if "end" in shape.step.attributes or len(taken.inputs) > 3:
            return None
        start, end = draft.ints(taken.inputs[1]), draft.ints(taken.inputs[2])
        if start is None or end is None or len(start) != 1 or len(end) != 1:
            return None
        axes += list(range(rank))[start[0] : end[0]]
    return axes
