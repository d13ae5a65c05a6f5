"""What computes nothing: constants are made once, and what hands its input on is left out. Bit-equal.

constants -> any deterministic op                       a constant, executed when it is first asked for
Identity, Dropout in inference, Cast to the same dtype, Max or Concat of one value, Slice of everything,
Transpose that moves no axis, Clip without bounds       their input
Transpose -> Transpose                                  one Transpose, or nothing
Reshape -> Reshape to a constant shape                  the second Reshape
Concat -> Concat along the same axis                    one Concat
"""

from __future__ import annotations

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.draft import Draft

_INT_MAX = (1 << 31) - 1


def fold_constants(draft: Draft) -> None:
    """Ops whose inputs are constants, but for DequantizeLinear: products of integers want what it reads."""
    _fold(draft, {"DequantizeLinear"})


def fold_dequantized(draft: Draft) -> None:
    """DequantizeLinear, too."""
    _fold(draft, set())


def _fold(draft: Draft, kept: set[str]) -> None:
    for op in draft.ops:
        executed = op.kernel is not None and op.deterministic and not op.reference and op.step.op_type not in kept
        if executed and all(map(draft.is_constant, op.reads)):
            draft.fold(op)


def clean(draft: Draft) -> None:
    """All the others."""
    for op in draft.ops:
        if op.step.domain == "" and len(op.outputs) >= 1 and op.inputs and op.inputs[0] != ABSENT:
            _clean(draft, op)
    draft.sweep()


def _clean(draft: Draft, op: Op) -> None:
    kind = op.step.op_type
    if _hands_on(draft, op):
        draft.bypass("identity", op, op.inputs[0])
    elif kind == "Transpose":
        _transposes(draft, op)
    elif kind == "Reshape":
        _reshapes(draft, op)
    elif kind == "Concat":
        _concats(draft, op)


def _hands_on(draft: Draft, op: Op) -> bool:
    """True if the output is the input."""
    kind = op.step.op_type
    if kind == "Identity" or (kind in ("Concat", "Max", "Mean", "Min", "Sum") and len(op.inputs) == 1):
        return True
    if kind == "Dropout":
        unused = len(op.outputs) == 1 or not draft.reads(op.outputs[1])
        trained = len(op.inputs) > 2 and op.inputs[2] != ABSENT and draft.scalar(op.inputs[2]) != 0
        return unused and not trained
    if kind in ("Cast", "CastLike"):
        return draft.dtype(op.inputs[0]) == op.step.outputs[0].dtype
    if kind == "Clip":
        return all(number == ABSENT for number in op.inputs[1:])
    return kind == "Slice" and _takes_all(draft, op)


def _takes_all(draft: Draft, op: Op) -> bool:
    """A Slice from 0 to the end, or to beyond any end, in steps of 1."""
    starts, ends = draft.ints(op.inputs[1]), draft.ints(op.inputs[2])
    steps = draft.ints(op.inputs[4]) if len(op.inputs) > 4 and op.inputs[4] != ABSENT else [1]
    shape = draft.shape(op.inputs[0])
    if starts is None or ends is None or steps is None or shape is None or any(starts) or set(steps) != {1}:
        return False
    axes = draft.ints(op.inputs[3]) if len(op.inputs) > 3 and op.inputs[3] != ABSENT else list(range(len(starts)))
    if axes is None:
        return False
    dims = [shape[axis] for axis in axes]
    return all(end >= (dim if isinstance(dim, int) else _INT_MAX) for end, dim in zip(ends, dims, strict=True))


def _transposes(draft: Draft, op: Op) -> None:
    perm = permutation(draft, op)
    if perm is None:
        return
    before = draft.inner(op.inputs[0], "Transpose")
    first = None if before is None else permutation(draft, before)
    if before is not None and first is not None:
        perm = [first[axis] for axis in perm]
        made = draft.replace("transposes", [op, before], "Transpose", before.inputs, {"perm": perm}, domain="")
        if made is None:
            return
        op = made
    if perm == list(range(len(perm))):
        draft.bypass("identity", op, op.inputs[0])


def permutation(draft: Draft, op: Op) -> list[int] | None:
    """The axes of a Transpose, None where they depend on an unknown rank."""
    perm = op.step.attributes.get("perm")
    if perm is not None:
        return [int(axis) for axis in perm]
    rank = draft.rank(op.inputs[0])
    return None if rank is None else list(range(rank))[::-1]


def _reshapes(draft: Draft, op: Op) -> None:
    before = draft.inner(op.inputs[0], "Reshape", "Flatten", "Squeeze", "Unsqueeze")
    target = draft.ints(op.inputs[1])
    if before is None or target is None or 0 in target:
        return  # 0 copies a dim of the input
    draft.replace("reshapes", [op, before], "Reshape", (before.inputs[0], op.inputs[1]), op.step.attributes, domain="")


def _concats(draft: Draft, op: Op) -> None:
    inputs, ops = list[int](), [op]
    for number in op.inputs:
        before = draft.inner(number, "Concat")
        if before is not None and before.step.attributes["axis"] == op.step.attributes["axis"]:
            inputs += before.inputs
            ops.append(before)
        else:
            inputs.append(number)
    if len(ops) > 1:
        draft.replace("concats", ops, "Concat", inputs, {"axis": op.step.attributes["axis"]}, domain="")
