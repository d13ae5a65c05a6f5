"""Element-wise operators of two or more tensors, with NumPy's (which is ONNX's) broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.blockwise import INSTRUCTIONS, Program, blockwise, scalar_operand, takes
from outrider.providers.cpu.kernels.elementwise import in_one_pass
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import convert, maximum, minimum, refuse, working
from outrider.providers.wire.dtypes import FLOATS, INTEGERS, NUMBERS
from outrider.providers.wire.graph import Node

_BOOL = frozenset({"bool"})


def _no_broadcast_attribute(node: Node) -> None:
    if node.opset < 7 and node.attributes.get("broadcast", 0):
        refuse(node, "broadcast")


def _target(b: Bind, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """The output, in the memory of an input of that shape and dtype where one dies here."""
    for i in range(len(b.inputs)):
        x = b.array(i)
        if x.shape == shape and x.dtype == dtype:
            return b.reuse(0, i)
    return b.out(0, shape, dtype)


def _shape(b: Bind) -> tuple[int, ...]:
    shapes = [b.array(i).shape for i in range(len(b.inputs))]
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"{b.node.label} {b.node.name}: shapes {shapes} do not broadcast") from None


_ufunc: Callable[..., Any]


def _register_arithmetic(ufunc: Any, op_type: str, dtypes: frozenset[str]) -> None:
    compiled = "elementwise" if op_type in INSTRUCTIONS else ()

    @kernel(op_type, dtypes={0: dtypes, 1: dtypes}, parse=_no_broadcast_attribute, compiled=compiled)
    def bind(b: Bind, p: None) -> None:
        x, y = b.array(0), b.array(1)
        shape = _shape(b)
        if not in_one_pass(b, op_type, x, y):
            b.step(ufunc, x, y, _target(b, shape, x.dtype))


for _ufunc, _name, _dtypes in (
    (np.add, "Add", NUMBERS),
    (np.subtract, "Sub", NUMBERS),
    (np.multiply, "Mul", NUMBERS),
    (np.logical_and, "And", _BOOL),
    (np.logical_or, "Or", _BOOL),
    (np.logical_xor, "Xor", _BOOL),
    (np.bitwise_and, "BitwiseAnd", INTEGERS),
    (np.bitwise_or, "BitwiseOr", INTEGERS),
    (np.bitwise_xor, "BitwiseXor", INTEGERS),
):
    _register_arithmetic(_ufunc, _name, _dtypes)


def _register_comparison(ufunc: Any, op_type: str, dtypes: frozenset[str]) -> None:
    @kernel(op_type, dtypes={0: dtypes, 1: dtypes}, parse=_no_broadcast_attribute, compiled="elementwise")
    def bind(b: Bind, p: None) -> None:
        x, y = b.array(0), b.array(1)
        shape = _shape(b)
        if x.dtype == object:
            b.value(0, lambda: np.asarray(ufunc(x, y), dtype=bool).reshape(shape))
        elif not in_one_pass(b, op_type, x, y, dtype=np.bool_, truths=True):
            b.step(ufunc, x, y, b.out(0, shape, bool))


for _ufunc, _name, _dtypes in (
    (np.equal, "Equal", NUMBERS | {"bool", "string"}),
    (np.less, "Less", NUMBERS),
    (np.greater, "Greater", NUMBERS),
    (np.less_equal, "LessOrEqual", NUMBERS),
    (np.greater_equal, "GreaterOrEqual", NUMBERS),
):
    _register_comparison(_ufunc, _name, _dtypes)


def _truncated(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    np.floor_divide(x - np.fmod(x, y), y, out)  # the difference is a multiple of y: floor and truncation agree


@kernel("Div", dtypes={0: NUMBERS, 1: NUMBERS}, parse=_no_broadcast_attribute, compiled="elementwise")
def div(b: Bind, p: None) -> None:
    """Div-14: integers truncate toward zero."""
    x, y = b.array(0), b.array(1)
    shape = _shape(b)
    if in_one_pass(b, "Div", x, y):
        return
    out = _target(b, shape, x.dtype)
    if x.dtype.kind == "u":
        b.step(np.floor_divide, x, y, out)
    elif x.dtype.kind == "i":
        b.step(_truncated, x, y, out)
    else:
        b.step(np.divide, x, y, out)


def _parse_mod(node: Node) -> bool:
    return bool(node.attributes.get("fmod", 0))


@kernel("Mod", since=10, dtypes={0: NUMBERS, 1: NUMBERS}, parse=_parse_mod)
def mod(b: Bind, p: bool) -> None:
    """Mod-13: sign of the divisor, or with fmod of the dividend."""
    x, y = b.array(0), b.array(1)
    b.step(np.fmod if p else np.remainder, x, y, _target(b, _shape(b), x.dtype))


def power_of(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """`x` to the power of `y` into `out`, of the dtype of `x`; a common exponent of 2, 1 or 1/2 is exact."""
    if y.size == 1 and x.dtype.kind != "u":
        # Read in the run, so that it does not depend on what is known when the node is bound. Exact, as pow() is here.
        exponent = y.item()
        if exponent == 2:
            np.multiply(x, x, out)
            return
        if exponent == 1:
            np.copyto(out, x)
            return
        if exponent == 0.5 and x.dtype.kind == "f":  # numpy's pow() takes the plain root, which differs below 0
            lowest = np.isneginf(x)  # `out` may be `x`
            np.sqrt(x + x.dtype.type(0), out)
            np.copyto(out, np.inf, "same_kind", lowest)
            return
    if x.dtype == y.dtype and x.dtype.kind not in "iu":
        np.power(x, y, out)
    elif x.dtype.kind in "iu" and y.dtype.kind in "iu" and (y.dtype.kind == "u" or not (y < 0).any()):
        np.copyto(out, np.power(x, y.astype(x.dtype)), "unsafe")
    elif x.dtype.kind in "iu" or y.dtype == np.float64:
        np.copyto(out, np.power(x.astype(np.float64), y.astype(np.float64)), "unsafe")
    else:
        wide = working(x.dtype)
        np.copyto(out, np.power(x.astype(wide), y.astype(wide)), "unsafe")


@kernel("Pow", dtypes={0: NUMBERS, 1: NUMBERS}, parse=_no_broadcast_attribute, compiled="elementwise")
def power(b: Bind, p: None) -> None:
    """Pow-15: the result has the dtype of the base; the exponent may have another."""
    x, y = b.array(0), b.array(1)
    shape = _shape(b)
    if not in_one_pass(b, "Pow", x, y):
        b.step(power_of, x, y, b.out(0, shape, x.dtype))


def _parse_shift(node: Node) -> bool:
    direction = node.attributes.get("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise Unsupported(f"direction={direction!r}, the kernel takes 'LEFT' and 'RIGHT'")
    return bool(direction == "LEFT")


def _shift(x: np.ndarray, y: np.ndarray, left: bool, out: np.ndarray) -> None:
    bits = 8 * x.dtype.itemsize
    outside = (y < 0) | (y >= bits)
    amount = np.where(outside, 0, y).astype(x.dtype)
    if left:
        shifted = np.where(outside, 0, np.left_shift(x, amount))
    else:
        shifted = np.where(outside, np.where(x < 0, -1, 0), np.right_shift(x, amount))
    np.copyto(out, shifted, "unsafe")


@kernel("BitShift", since=11, dtypes={0: INTEGERS, 1: INTEGERS}, parse=_parse_shift)
def bit_shift(b: Bind, p: bool) -> None:
    """BitShift-28: shifts by a negative number or past the width leave copies of the sign bit, or 0."""
    x, y = b.array(0), b.array(1)
    b.step(_shift, x, y, p, b.out(0, _shape(b), x.dtype))


def _fold(b: Bind, ufunc: Any, out: np.ndarray) -> None:
    """ufunc over all inputs, from the left, into `out`."""
    if len(b.inputs) == 1:
        b.step(convert, out, b.array(0))
        return
    total = b.array(0)
    for i in range(1, len(b.inputs)):
        b.step(ufunc, total, b.array(i), out)
        total = out


def _folding(name: str, inputs: int, mean: bool) -> Program:
    """`name` over the inputs, from the left; for a mean divided by the input that follows them."""
    program: list[tuple[str | int, ...]] = [(name, 0, 1)]
    first = inputs + mean
    program += [(name, first + i - 2, i) for i in range(2, inputs)]
    if mean:
        program.append(("Div", first + inputs - 2, inputs))
    return program


def _register_variadic(ufunc: Any, op_type: str, dtypes: frozenset[str], mean: bool = False) -> None:
    name = op_type if op_type in INSTRUCTIONS else "Add"

    @kernel(op_type, dtypes={0: dtypes}, compiled="elementwise")
    def bind(b: Bind, p: None) -> None:
        dtype = b.array(0).dtype
        shape = _shape(b)
        if len(b.inputs) == 1:
            b.view(0, b.array(0))
            return
        inputs, library = [b.array(i) for i in range(len(b.inputs))], b.compiled("elementwise")
        if library is not None and takes(shape, [*inputs, *inputs[: int(mean)]]):
            count = [scalar_operand(len(inputs))] if mean else []
            blockwise(b, library, _folding(name, len(inputs), mean), [*inputs, *count], len(inputs))
            return
        if len(b.inputs) == 2 and not mean:
            b.step(ufunc, b.array(0), b.array(1), _target(b, shape, dtype))
            return
        # The last inputs are read after the first write: no reuse of their memory.
        out = b.out(0, shape, dtype)
        wide = working(dtype) if ufunc is np.add else dtype
        total = out if wide == dtype else b.scratch(shape, wide)
        _fold(b, ufunc, total)
        if mean:
            b.step(np.divide, total, wide.type(len(b.inputs)), total)
        if total is not out:
            b.step(convert, out, total)


for _ufunc, _name, _dtypes, _mean in (
    (maximum, "Max", NUMBERS, False),
    (minimum, "Min", NUMBERS, False),
    (np.add, "Sum", FLOATS, False),
    (np.add, "Mean", FLOATS, True),
):
    _register_variadic(_ufunc, _name, _dtypes, _mean)


def _select(condition: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, y)
    np.copyto(out, x, "same_kind", condition)


@kernel("Where", since=9, dtypes={0: _BOOL}, compiled="elementwise")
def where(b: Bind, p: None) -> None:
    """Where-16: x where the condition holds, else y."""
    condition, x, y = b.array(0), b.array(1), b.array(2)
    shape = _shape(b)
    if x.dtype == object:
        b.value(0, lambda: np.where(condition, x, y))
    elif x.dtype == np.bool_ or not in_one_pass(b, "Where", condition, x, y, truths=True):
        b.step(_select, condition, x, y, b.out(0, shape, x.dtype))
