"""What scalar arithmetic around a value amounts to, whatever the spelling: products, polynomials, affine forms.

`ops` are the ops that were looked through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.draft import Draft

CLOSE = 1e-6  # relative; constants of formulas are rounded to float32


def close(a: float | None, b: float) -> bool:
    """True for a constant of a formula, give or take rounding."""
    return a is not None and math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-9)


@dataclass
class Product:
    """constant * leaves[0] * leaves[1] * ..."""

    constant: float
    leaves: list[int]
    ops: list[Op]


def product(draft: Draft, op: Op) -> Product | None:
    """The factors of a Mul, or of a Div by a constant, in any nesting; None for another op."""
    if op.step.domain or op.step.op_type not in ("Mul", "Div"):
        return None
    found = Product(1.0, [], [op])
    for i, number in enumerate(op.inputs):
        constant = draft.scalar(number)
        if constant is not None and not (op.step.op_type == "Div" and i == 0):
            found.constant *= constant if op.step.op_type == "Mul" else (1 / constant if constant else math.nan)
            continue
        if op.step.op_type == "Div" and (i == 1 or draft.scalar(number) is not None):
            return None
        inner = draft.inner(number, "Mul", "Div")
        below = None if inner is None else product(draft, inner)
        if below is None:
            found.leaves.append(number)
        else:
            found.constant *= below.constant
            found.leaves += below.leaves
            found.ops += below.ops
    return found


Polynomial = Mapping[int, float]


def polynomial(draft: Draft, number: int, x: int, ops: list[Op]) -> Polynomial | None:
    """The value as a polynomial in `x`, power -> coefficient; None if it is none.

    `ops` gets what was looked through.
    """
    if number == x:
        return {1: 1.0}
    constant = draft.scalar(number)
    if constant is not None:
        return {0: constant}
    op = draft.maker(number, "Add", "Sub", "Mul", "Div", "Pow")
    if op is None or len(ops) > 12 or len(op.inputs) != 2:
        return None
    ops.append(op)
    a, b = (polynomial(draft, one, x, ops) for one in op.inputs)
    if a is None or b is None:
        return None
    return _combined(op.step.op_type, a, b)


def _combined(kind: str, a: Polynomial, b: Polynomial) -> Polynomial | None:
    if kind in ("Add", "Sub"):
        sign = 1 if kind == "Add" else -1
        return {power: a.get(power, 0.0) + sign * b.get(power, 0.0) for power in {*a, *b}}
    if kind == "Mul":
        made: dict[int, float] = {}
        for p, one in a.items():
            for q, other in b.items():
                made[p + q] = made.get(p + q, 0.0) + one * other
        return made
    if set(b) != {0}:
        return None
    if kind == "Div":
        return {power: one / b[0] for power, one in a.items()} if b[0] else None
    if b[0] not in (2.0, 3.0):
        return None
    made = dict(a)
    for _ in range(int(b[0]) - 1):
        made = dict(_combined("Mul", made, a) or {})
    return made


def is_polynomial(found: Polynomial | None, wanted: Polynomial) -> bool:
    """True where the coefficients are these, give or take rounding."""
    return found is not None and all(close(found.get(p, 0.0), wanted.get(p, 0.0)) for p in {*found, *wanted})


def bounds(draft: Draft, op: Op) -> tuple[float, float] | None:
    """(low, high) of a Clip with constant bounds; Relu is one."""
    if op.step.op_type == "Relu":
        return 0.0, math.inf
    if op.step.op_type != "Clip":
        return None
    numbers = [*op.inputs[1:], ABSENT, ABSENT][:2]
    found = [draft.scalar(number) for number in numbers]
    if any(number != ABSENT and one is None for number, one in zip(numbers, found, strict=True)):
        return None
    low, high = found
    return (-math.inf if low is None else low), (math.inf if high is None else high)


def keeps_rank(draft: Draft, ops: Sequence[Op], x: int) -> bool:
    """True if no constant float that these ops read has more axes than `x`, and would give them to the result."""
    rank = draft.rank(x) or 0
    constants = {number for op in ops for number in op.inputs if number != ABSENT and draft.is_constant(number)}
    return all((draft.rank(n) or 0) <= rank for n in constants if draft.dtype(n) == draft.dtype(x))


def other(op: Op, number: int) -> int:
    """The operand of a binary op that is not this one."""
    return op.inputs[1] if op.inputs[0] == number else op.inputs[0]


def axes_last(draft: Draft, op: Op, source: int) -> bool:
    """True for a reduction over the last axis that keeps it."""
    if op.step.attributes.get("keepdims", 1) != 1:
        return False
    given = draft.ints(op.inputs[1]) if len(op.inputs) > 1 else op.step.attributes.get("axes")
    rank = draft.rank(source)
    return given is not None and list(given) in ([-1], [] if rank is None else [rank - 1])


def reduces_last(draft: Draft, op: Op) -> bool:
    """`axes_last` for its own input."""
    return axes_last(draft, op, op.inputs[0])
