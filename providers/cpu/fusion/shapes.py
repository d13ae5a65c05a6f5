"""Shapes that the graph does not declare, as far as patterns need them: ranks, and dims that weights fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outrider.providers.cpu.blocks import ABSENT, Op

Shape = tuple[Any, ...] | None
Shapes = Callable[[int], Shape]
Ints = Callable[[int], "list[int] | None"]

_SAME = frozenset(
    ("Abs", "BatchNormalization", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Dropout", "Elu", "Erf", "Exp", "Floor",
     "Gelu", "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "IsNaN", "LayerNormalization",
     "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Not", "RMSNormalization", "Reciprocal", "Relu", "Round",
     "Selu", "Sigmoid", "Sign", "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh", "ThresholdedRelu")
)  # fmt: skip
_BROADCAST = frozenset(
    ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where", "And", "Or", "Xor", "Equal", "Greater",
     "GreaterOrEqual", "Less", "LessOrEqual", "PRelu", "Mod")
)  # fmt: skip


class Inference:
    """`shape`: of a value, as far as it is known; `ints`: the elements of a small constant; `maker`: of a value."""

    def __init__(self, shape: Shapes, ints: Ints, maker: Callable[[int], Op | None]) -> None:
        self._shape = shape
        self._ints = ints
        self._maker = maker

    def output(self, op: Op) -> Shape:
        """The shape of the op's first output, None where nothing is known of it."""
        kind = op.step.op_type
        if op.step.domain or not op.inputs:
            return None
        if kind in _SAME:
            return self._shape(op.inputs[0])
        if kind in _BROADCAST:
            return broadcast([self._shape(number) for number in op.inputs])
        rule = _RULES.get(kind)
        return None if rule is None else rule(self, op)

    def contents(self, number: int, depth: int = 0) -> list[int | None] | None:
        """The elements of a value of integers of one axis, None for those that are not known."""
        found = self._ints(number)
        if found is not None:
            return list(found)
        op = self._maker(number)
        if op is not None and op.step.domain == "" and depth < 8:
            if op.step.op_type in ("Cast", "Identity"):
                return self.contents(op.inputs[0], depth + 1)
            if op.step.op_type == "Concat":
                parts = [self.contents(one, depth + 1) for one in op.inputs]
                return None if None in parts else [dim for part in parts for dim in part or ()]
            if op.step.op_type == "Shape":
                return self._dims(op)
            if op.step.op_type == "Slice":
                return self._part(op, depth)
        shape = self._shape(number)
        if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
            return None
        return [None] * shape[0]

    def _dims(self, op: Op) -> list[int | None] | None:
        shape, get = self._shape(op.inputs[0]), op.step.attributes.get
        dims = None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]
        return None if dims is None else dims[int(get("start", 0)) : int(get("end", len(dims)))]

    def _part(self, op: Op, depth: int) -> list[int | None] | None:
        whole = self.contents(op.inputs[0], depth + 1)
        start, end = self._ints(op.inputs[1]), self._ints(op.inputs[2])
        steps = self._ints(op.inputs[4]) if len(op.inputs) > 4 and op.inputs[4] != ABSENT else [1]
        if whole is None or start is None or end is None or steps != [1]:
            return None
        return whole[start[0] : end[0]]

    # Operators -------------------------------------------------------------------------------------------------------
    def reshape(self, op: Op) -> Shape:
        """Reshape: -1 and 0 are unknown here."""
        dims = self.contents(op.inputs[1])
        return None if dims is None else tuple(dim if dim is not None and dim > 0 else None for dim in dims)

    def extents(self, op: Op) -> Shape:
        """Shape: how many."""
        dims = self._dims(op)
        return None if dims is None else (len(dims),)

    def transpose(self, op: Op) -> Shape:
        """Transpose: perm tells the rank even of an unknown input."""
        shape, perm = self._shape(op.inputs[0]), op.step.attributes.get("perm")
        if perm is None:
            return None if shape is None else shape[::-1]
        return tuple(None if shape is None else shape[axis] for axis in perm)

    def matmul(self, op: Op) -> Shape:
        """MatMul of operands of two axes or more."""
        a, b = self._shape(op.inputs[0]), self._shape(op.inputs[1])
        if a is None or b is None or len(a) < 2 or len(b) < 2:
            return None
        batch = broadcast([a[:-2], b[:-2]])
        return None if batch is None else (*batch, a[-2], b[-1])

    def conv(self, op: Op) -> Shape:
        """Conv: batch and channels."""
        x, w = self._shape(op.inputs[0]), self._shape(op.inputs[1])
        return None if w is None else (None if x is None else x[0], w[0], *[None] * (len(w) - 2))

    def reduction(self, op: Op) -> Shape:
        """Reductions over known axes that keep them."""
        shape = self._shape(op.inputs[0])
        given = self._ints(op.inputs[1]) if len(op.inputs) > 1 else op.step.attributes.get("axes")
        if shape is None or given is None or not op.step.attributes.get("keepdims", 1):
            return None
        axes = {axis % len(shape) for axis in given}
        return tuple(1 if axis in axes else dim for axis, dim in enumerate(shape))

    def slice(self, op: Op) -> Shape:
        """Slice: the rank, and how much is taken of one axis that is known."""
        shape = self._shape(op.inputs[0])
        if shape is not None and len(shape) == 1:
            part = self._part(op, 0)
            return (None if part is None else len(part),)
        return None if shape is None else (None,) * len(shape)

    def concat(self, op: Op) -> Shape:
        """Concat: what one of the inputs tells of the other axes."""
        shapes = [shape for shape in map(self._shape, op.inputs) if shape is not None]
        if not shapes:
            return None
        axis = int(op.step.attributes["axis"]) % len(shapes[0])
        return tuple(None if i == axis else dim for i, dim in enumerate(shapes[0]))

    def squeeze(self, op: Op) -> Shape:
        """Squeeze of known axes."""
        shape = self._shape(op.inputs[0])
        axes = self._ints(op.inputs[1]) if len(op.inputs) > 1 else None
        if shape is None or axes is None:
            return None
        gone = {axis % len(shape) for axis in axes}
        return tuple(dim for axis, dim in enumerate(shape) if axis not in gone)

    def unsqueeze(self, op: Op) -> Shape:
        """Unsqueeze by known axes."""
        shape, axes = self._shape(op.inputs[0]), self._ints(op.inputs[1])
        if shape is None or axes is None:
            return None
        rank = len(shape) + len(axes)
        new, rest = {axis % rank for axis in axes}, iter(shape)
        return tuple(1 if axis in new else next(rest) for axis in range(rank))


_RULES: dict[str, Callable[[Inference, Op], Shape]] = {
    "Reshape": Inference.reshape, "Shape": Inference.extents,
    "Transpose": Inference.transpose, "MatMul": Inference.matmul, "Conv": Inference.conv,
    "ReduceMean": Inference.reduction, "ReduceSum": Inference.reduction, "ReduceMax": Inference.reduction,
    "Slice": Inference.slice, "Concat": Inference.concat, "Squeeze": Inference.squeeze,
    "Unsqueeze": Inference.unsqueeze,
}  # fmt: skip


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that these broadcast to, None for a dim that is not known; None where a rank is not known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or not known:
        return None
    rank = max(map(len, known))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in known]
    return tuple(_joined(dims) for dims in zip(*padded, strict=True))


def _joined(dims: Sequence[Any]) -> Any:
    wide = [dim for dim in dims if dim != 1]
    numbers = [dim for dim in wide if isinstance(dim, int)]
    if numbers or not wide:
        return numbers[0] if numbers else 1
    return wide[0] if all(dim == wide[0] for dim in wide) else None


def merged(declared: Shape, found: Shape) -> Shape:
    """What is declared, completed by what was found."""
    if declared is None or found is None or len(declared) != len(found):
        return found if declared is None else declared
    return tuple(two if one is None else one for one, two in zip(declared, found, strict=True))
