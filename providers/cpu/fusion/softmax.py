"""Softmax, and what stands around it in attention. Within tolerance.

Exp(x - ReduceMax(x)) / ReduceSum(Exp(...))               Softmax
Mul or Div by a number -> [Add mask ->] Softmax           outrider::Softmax: softmax(x * factor + mask)
Softmax -> Where(IsNaN(y), 0, y)                          the same with rows of nothing but -inf as 0
"""

from __future__ import annotations

from typing import Any

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import keeps_rank, other


def fuse_softmaxes(draft: Draft) -> None:
    """All of them."""
    for op in draft.ops:
        if draft.has(op) and op.step.domain == "" and op.step.op_type == "Div":
            _softmax(draft, op)
    for op in draft.ops:
        if draft.has(op) and op.step.domain == "" and op.step.op_type == "Softmax":
            _masked(draft, op)


def _softmax(draft: Draft, op: Op) -> None:
    """From the division down."""
    exp, total = draft.maker(op.inputs[0], "Exp"), draft.maker(op.inputs[1], "ReduceSum")
    if exp is None or total is None or total.inputs[0] != op.inputs[0]:
        return
    less = draft.maker(exp.inputs[0], "Sub")
    top = None if less is None else draft.maker(less.inputs[1], "ReduceMax")
    if less is None or top is None or top.inputs[0] != less.inputs[0]:
        return
    axis = _axis(draft, total)
    if axis is None or _axis(draft, top) != axis:
        return
    ops = [op, exp, total, less, top]
    draft.replace("softmax", ops, "Softmax", [less.inputs[0]], {"axis": axis}, domain="", title="Softmax")


def _axis(draft: Draft, op: Op) -> int | None:
    """The one axis of a reduction that keeps it, counted from the end where the rank is known."""
    if op.step.attributes.get("keepdims", 1) != 1:
        return None
    axes = draft.ints(op.inputs[1]) if len(op.inputs) > 1 else op.step.attributes.get("axes")
    rank = draft.rank(op.inputs[0])
    if axes is None or len(axes) != 1:
        return None
    axis = int(axes[0])
    return axis - rank if axis >= 0 and rank is not None else axis


def _masked(draft: Draft, op: Op) -> None:
    if op.step.outputs[0].dtype != "float32":
        return
    axis = int(op.step.attributes.get("axis", -1))
    rank = draft.rank(op.inputs[0])
    ops, x, mask, factor = [op], op.inputs[0], ABSENT, 1.0
    if rank is not None and axis in (-1, rank - 1):
        added = draft.inner(x, "Add")
        if added is not None:
            scores = _scores(draft, added)
            if not _is_bias(draft, other(added, scores)):
                ops, x, mask = [*ops, added], scores, other(added, scores)
    scaled = draft.inner(x, "Mul", "Div")
    if scaled is not None and keeps_rank(draft, [scaled], _operand(draft, scaled)):
        constants = [draft.scalar(number) for number in scaled.inputs]
        if constants[1] is not None and (scaled.step.op_type == "Mul" or constants[1]):
            x, factor = scaled.inputs[0], constants[1] if scaled.step.op_type == "Mul" else 1 / constants[1]
        elif constants[0] is not None and scaled.step.op_type == "Mul":
            x, factor = scaled.inputs[1], constants[0]
        if x not in ops[-1].inputs:
            ops.append(scaled)
    attributes: dict[str, Any] = {"axis": axis, "factor": factor}
    guard = _guard(draft, op)
    if guard and draft.replace("softmax+guard", [*ops, *guard], "Softmax", [x, mask], {**attributes, "nan_to_zero": 1}):
        return
    if len(ops) > 1:
        draft.replace("softmax+mask" if mask != ABSENT else "softmax+factor", ops, "Softmax", [x, mask], attributes)


def _operand(draft: Draft, op: Op) -> int:
    return op.inputs[1] if draft.is_constant(op.inputs[0]) else op.inputs[0]


def _scores(draft: Draft, added: Op) -> int:
    """The operand of an addition that is no mask: made by a product, or the first."""
    made = ("MatMul", "Mul", "Div")
    for number in added.inputs:
        if not draft.is_constant(number) and (
            draft.inner(number, *made) is not None or draft.own(number, "MatMul") is not None
        ):
            return number
    return next((number for number in added.inputs if not draft.is_constant(number)), added.inputs[0])


def _is_bias(draft: Draft, number: int) -> bool:
    """True for a constant of one row, which belongs to the product before."""
    shape = draft.shape(number)
    return draft.is_constant(number) and shape is not None and all(dim == 1 for dim in shape[:-1])


def _guard(draft: Draft, op: Op) -> list[Op]:
    """IsNaN and Where that put 0 for NaN."""
    y = op.outputs[0]
    where = next((reader for reader in draft.readers(y) if reader.step.op_type == "Where"), None)
    if where is None or where.inputs[2] != y or draft.scalar(where.inputs[1]) != 0:
        return []
    test = draft.inner(where.inputs[0], "IsNaN")
    return [test, where] if test is not None and test.inputs[0] == y else []
