"""Normalisations over the last axis, written in small pieces. Within tolerance.

    d = x - ReduceMean(x)
    d / Sqrt(ReduceMean(d * d) + eps) [* scale [+ bias]]      LayerNormalization; InstanceNormalization where there
                                                              is no scale to tell how long the axis is
    x / Sqrt(ReduceMean(x * x) + eps) [* scale]               RMSNormalization

d may be computed twice, d * d may be Pow(d, 2), the division may be a product with Reciprocal, 1 / Sqrt or Pow(-0.5).
A BatchNormalization that nothing else takes becomes x * factor + offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.affine import Affine, per_feature, step_of
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import close, keeps_rank, other, reduces_last


def fuse_normalizations(draft: Draft) -> None:
    """LayerNormalization and RMSNormalization."""
    for op in draft.ops:
        if not draft.has(op) or op.step.domain or op.step.outputs[0].dtype != "float32":
            continue
        for centred, root, ops in _quotients(draft, op):
            if _normalization(draft, op, centred, root, ops):
                break


def _quotients(draft: Draft, op: Op) -> Iterator[tuple[int, int, list[Op]]]:
    """(numerator, what the root is taken of, ops) for each reading of an op as x / Sqrt(y)."""
    if op.step.op_type == "Div":
        root = draft.maker(op.inputs[1], "Sqrt")
        if root is not None:
            yield op.inputs[0], root.inputs[0], [op, root]
    elif op.step.op_type == "Mul":
        for x, gate in (op.inputs, op.inputs[::-1]):
            found = _inverse_root(draft, gate)
            if found is not None:
                yield x, found[0], [op, *found[1]]


def _inverse_root(draft: Draft, number: int) -> tuple[int, list[Op]] | None:
    """(y, ops) of a value that is 1 / Sqrt(y)."""
    op = draft.maker(number, "Reciprocal", "Div", "Pow")
    if op is None:
        return None
    if op.step.op_type == "Pow":
        return (op.inputs[0], [op]) if close(draft.scalar(op.inputs[1]), -0.5) else None
    if op.step.op_type == "Div" and draft.scalar(op.inputs[0]) != 1:
        return None
    root = draft.maker(op.inputs[-1], "Sqrt")
    return None if root is None else (root.inputs[0], [op, root])


def _normalization(draft: Draft, op: Op, x: int, variance: int, ops: list[Op]) -> bool:
    added = draft.maker(variance, "Add")
    if added is None:
        return False
    constants = [draft.scalar(number) for number in added.inputs]
    epsilon = next((one for one in constants if one is not None), None)
    mean = draft.maker(added.inputs[0] if constants[0] is None else added.inputs[1], "ReduceMean")
    if epsilon is None or mean is None or not reduces_last(draft, mean):
        return False
    squared = draft.maker(mean.inputs[0], "Mul", "Pow")
    if squared is None or not _is_square(draft, squared):
        return False
    ops = [*ops, added, mean, squared]
    if not keeps_rank(draft, ops, x):
        return False
    centred = [*ops]
    source = _centred(draft, x, centred)
    if source is not None and _centred(draft, squared.inputs[0], centred) == source:
        return _finished(draft, op, source, epsilon, centred, "LayerNormalization")
    return squared.inputs[0] == x and _finished(draft, op, x, epsilon, ops, "RMSNormalization")


def _is_square(draft: Draft, op: Op) -> bool:
    if op.step.op_type == "Mul":
        return op.inputs[0] == op.inputs[1]
    return draft.scalar(op.inputs[1]) == 2


def _centred(draft: Draft, number: int, ops: list[Op]) -> int | None:
    """x where the value is x - ReduceMean(x)."""
    op = draft.maker(number, "Sub")
    mean = None if op is None else draft.maker(op.inputs[1], "ReduceMean")
    if op is None or mean is None or mean.inputs[0] != op.inputs[0] or not reduces_last(draft, mean):
        return None
    ops += [one for one in (op, mean) if one not in ops]
    return op.inputs[0]


def _finished(draft: Draft, op: Op, x: int, epsilon: float, ops: list[Op], kind: str) -> bool:
    """With scale and bias where they follow."""
    shape = draft.shape(x)
    scale = bias = ABSENT
    for name in ("Mul", "Add") if kind == "LayerNormalization" else ("Mul",):
        after = draft.reader(op.outputs[0])
        if after is None or after.step.domain or after.step.op_type != name:
            break
        constant = other(after, op.outputs[0])
        if not draft.is_constant(constant) or not _row(draft.shape(constant), shape):
            break
        ops.append(after)
        op = after
        if name == "Mul":
            scale = constant
        else:
            bias = constant
    if scale == ABSENT:
        features = None if shape is None else shape[-1]
        if not isinstance(features, int):
            return kind == "LayerNormalization" and _instance(draft, x, epsilon, ops)
        scale = draft.derived(f"scale of {op.origin.name}", (features,), lambda: np.ones(features))
    else:
        scale = _flat(draft, scale)
    inputs = [x, scale, ABSENT if bias == ABSENT else _flat(draft, bias)]
    attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
    return draft.replace(kind, ops, kind, inputs, attributes, domain="", title=kind) is not None


def _instance(draft: Draft, x: int, epsilon: float, ops: list[Op]) -> bool:
    """Of [N, C, length] with an unknown length."""
    shape = draft.shape(x) or ()
    if len(shape) != 3 or not isinstance(shape[1], int):
        return False
    kind, size = "InstanceNormalization", shape[1:2]
    ones = draft.derived("scale of a normalization", size, lambda: np.ones(size))
    zeros = draft.derived("bias of a normalization", size, lambda: np.zeros(size))
    made = draft.replace(kind, ops, kind, [x, ones, zeros], {"epsilon": epsilon}, domain="", title=kind)
    return made is not None


def _row(constant: tuple[int, ...] | None, shape: tuple[Any, ...] | None) -> bool:
    """True for a constant [features], and for that behind ones, where the last axis of `shape` has so many."""
    if not constant or len(constant) > (1 if shape is None else len(shape)) or any(dim != 1 for dim in constant[:-1]):
        return False
    features = None if shape is None else shape[-1]
    return constant[-1] == features


def _flat(draft: Draft, number: int) -> int:
    shape = draft.shape(number) or ()
    return number if len(shape) == 1 else draft.derived("scale or bias", shape[-1:], np.ravel, number)


def fuse_batch_normalizations(draft: Draft) -> None:
    """Those that are left, as arithmetic that joins what stands around it."""
    for op in draft.ops:
        if op.step.domain or op.step.op_type != "BatchNormalization" or op.step.outputs[0].dtype != "float32":
            continue
        x, shape = op.inputs[0], draft.shape(op.inputs[0])
        features = draft.shape(op.inputs[1])
        if shape is None or features is None or len(shape) < 2:
            continue
        step = step_of(draft, op, x, features[0], 1, len(shape))
        if step is None or per_feature(features, features[0], -1, 1) is None:
            continue
        affine = Affine(features[0]).then(step)
        column = (features[0], *[1] * (len(shape) - 2))
        parts = [
            draft.derived(
                f"{name} of {op.origin.name}",
                column,
                lambda *given, i=i, affine=affine, column=column: affine.values(given)[i].reshape(column),
                *affine.numbers,
            )
            for i, name in enumerate(("factor", "offset"))
        ]
        program = [["Mul", 0, 1], ["Add", 3, 2]]
        draft.replace("batch-normalization", [op], "Chain", [x, *parts], {"program": program})
