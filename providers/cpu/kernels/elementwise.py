"""Element-wise operators of one tensor: unary mathematics, rounding, tests and bits. Activations: `activations.py`.

One ufunc is one step in the dtype of the input; what takes several steps runs in float32 for 16-bit floats and is
rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.blockwise import INSTRUCTIONS, blockwise, takes
from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.cpu.kernels.support import clamp, convert, scalar, widened
from outrider.providers.cpu.team import parts
from outrider.providers.wire.dtypes import FLOATS, INTEGERS, NUMBERS, SIGNED
from outrider.providers.wire.graph import Node

_UFUNCS: tuple[tuple[Any, frozenset[str], tuple[str, ...]], ...] = (
    (np.absolute, NUMBERS, ("Abs",)),
    (np.negative, FLOATS | SIGNED, ("Neg",)),
    (np.sign, NUMBERS, ("Sign",)),
    (np.invert, INTEGERS, ("BitwiseNot",)),
    (np.logical_not, frozenset({"bool"}), ("Not",)),
    (np.exp, FLOATS, ("Exp",)),
    (np.log, FLOATS, ("Log",)),
    (np.sqrt, FLOATS, ("Sqrt",)),
    (np.floor, FLOATS, ("Floor",)),
    (np.ceil, FLOATS, ("Ceil",)),
    (np.rint, FLOATS, ("Round",)),  # half to even, as ONNX asks
    (np.sin, FLOATS, ("Sin",)),
    (np.cos, FLOATS, ("Cos",)),
    (np.tan, FLOATS, ("Tan",)),
    (np.arcsin, FLOATS, ("Asin",)),
    (np.arccos, FLOATS, ("Acos",)),
    (np.arctan, FLOATS, ("Atan",)),
    (np.sinh, FLOATS, ("Sinh",)),
    (np.cosh, FLOATS, ("Cosh",)),
    (np.tanh, FLOATS, ("Tanh",)),
    (np.arcsinh, FLOATS, ("Asinh",)),
    (np.arccosh, FLOATS, ("Acosh",)),
    (np.arctanh, FLOATS, ("Atanh",)),
)


def in_one_pass(b: Bind, name: str, *inputs: np.ndarray, dtype: Any = np.float32, truths: bool = False) -> bool:
    """Record output 0 = name(inputs) by the compiled library, where it has that instruction for these inputs.

    `dtype`: float32 or bool; `truths`: inputs may be bool.
    """
    library = b.compiled("elementwise")
    if library is None or name not in INSTRUCTIONS:
        return False
    if not takes(np.broadcast_shapes(*(x.shape for x in inputs)), inputs, truths):
        return False
    blockwise(b, library, [(name, *range(len(inputs)))], inputs, len(b.inputs), dtype)
    return True


def _register_ufunc(ufunc: Any, op_type: str, dtypes: frozenset[str]) -> None:
    compiled = "elementwise" if op_type in INSTRUCTIONS else ()

    @kernel(op_type, dtypes={0: dtypes}, compiled=compiled)
    def bind(b: Bind, p: None) -> None:
        x = b.array(0)
        if not in_one_pass(b, op_type, x):
            b.step(ufunc, x, b.reuse(0, 0))


for _ufunc, _dtypes, _names in _UFUNCS:
    for _name in _names:
        _register_ufunc(_ufunc, _name, _dtypes)


@kernel("Reciprocal", dtypes={0: FLOATS}, compiled="elementwise")
def reciprocal(b: Bind, p: None) -> None:
    """1 / x."""
    x = b.array(0)
    if not in_one_pass(b, "Reciprocal", x):
        b.step(np.divide, x.dtype.type(1), x, b.reuse(0, 0))


@kernel("Identity")
def identity(b: Bind, p: None) -> None:
    """The input itself, whatever it is: tensor, sequence or optional."""
    item = b.inputs[0]
    if isinstance(item, np.ndarray) and item.dtype != object:
        b.view(0, item)
    else:
        b.value(0, lambda: item)


@kernel("IsNaN", dtypes={0: FLOATS}, compiled="elementwise")
def is_nan(b: Bind, p: None) -> None:
    """bool, True where x is not a number."""
    x = b.array(0)
    if in_one_pass(b, "NotEqual", x, x, dtype=np.bool_):
        return
    b.step(np.isnan, x, b.out(0, x.shape, bool))


def _parse_isinf(node: Node) -> tuple[bool, bool]:
    attributes = node.attributes
    return bool(attributes.get("detect_negative", 1)), bool(attributes.get("detect_positive", 1))


@kernel("IsInf", dtypes={0: FLOATS}, parse=_parse_isinf)
def is_inf(b: Bind, p: tuple[bool, bool]) -> None:
    """bool, True where x is infinite and its sign is asked for."""
    x = b.array(0)
    y = b.out(0, x.shape, bool)
    negative, positive = p
    if negative and positive:
        b.step(np.isinf, x, y)
    elif negative or positive:
        b.step(np.equal, x, x.dtype.type(np.inf if positive else -np.inf), y)
    else:
        b.step(y.fill, False)


@kernel("Clip", since=11, dtypes={0: NUMBERS}, compiled="elementwise")
def clip(b: Bind, p: None) -> None:
    """Clip-13: min(max(x, min), max); bounds are optional one-element inputs, NaN stays NaN."""
    x = b.array(0)
    low, high = (scalar(b, b.array(i)) if b.has(i) else None for i in (1, 2))
    if _clipped_in_one_pass(b, x, low, high):
        return
    y = b.reuse(0, 0)
    if low is None and high is None:
        b.step(np.copyto, y, x)
    else:
        clamp(b, x, y, low, high)


def _clipped_in_one_pass(b: Bind, x: np.ndarray, low: np.ndarray | None, high: np.ndarray | None) -> bool:
    library = b.compiled("elementwise")
    bounds = [bound for bound in (low, high) if bound is not None]
    if library is None or not bounds or not takes(x.shape, [x, *bounds]):
        return False
    name = "Clip" if len(bounds) == 2 else "Max" if high is None else "Min"
    blockwise(b, library, [(name, *range(1 + len(bounds)))], [x, *bounds], 1)
    return True


def _parse_shrink(node: Node) -> tuple[float, float]:
    return float(node.attributes.get("lambd", 0.5)), float(node.attributes.get("bias", 0.0))


def _shrink(x: np.ndarray, y: np.ndarray, lambd: float, bias: float) -> None:
    above, below = x > lambd, x < -lambd
    shifted = np.where(above, x - bias, np.where(below, x + bias, 0))
    np.copyto(y, shifted, "unsafe")


@kernel("Shrink", dtypes={0: NUMBERS}, parse=_parse_shrink)
def shrink(b: Bind, p: tuple[float, float]) -> None:
    """Shrink-9: x + bias below -lambd, x - bias above lambd, else 0."""
    x = b.array(0)
    b.step(_shrink, x, b.reuse(0, 0), *p)


# Erf ----------------------------------------------------------------------------------------------------------------
# float32: erf(x) = tanh(x P(x^2)), |x| <= 4; least-maximum fit of atanh(erf(x)) / x, relative error 2.7e-7.
_ERF32 = tuple(
    np.float32(c)
    for c in (
        1.128379225730896, 0.10276905447244644, -0.00019182970572728664, -0.000619785743765533,
        8.763777441345155e-05, -5.668555331794778e-06, 1.418570576561251e-07,
    )
)  # fmt: skip
# float64, |x| <= 1: erf(x) = x R(x^2), Chebyshev fit.
_ERF64_SMALL = (
    1.1283791670955128, -0.3761263890318232, 0.11283791670927626, -0.02686617064480147, 0.0052239776557141075,
    -0.0008548330175996965, 0.00012055486424394259, -1.4930036742862556e-05, 1.6541039912496284e-06,
    -1.727180887455029e-07, 2.124629218879248e-08, -3.803094533600204e-09, 5.268356063861755e-10,
)  # fmt: skip
# float64, 1 <= |x| <= 6: erf(x) = 1 - t exp(Q(t) - x^2) with t = 2 / (2 + |x|), Chebyshev fit of ln(erfc(x) / t) + x^2.
_ERF64_LARGE = (
    -1.265514144330381, 1.0000743725994392, 0.37373649601649384, 0.0964643022833127, -0.17915539429538216,
    0.33401762024759163, -1.9118803477693076, 5.249534374252149, -11.132393233927004, 18.152161991693603,
    -20.72094710499922, 15.76330141803354, -7.626724262645148, 2.1279898132378143, -0.26065725694853314,
)  # fmt: skip
_ERF_TIME = 5.0  # nanoseconds per element in float32
_BLOCK = 16384  # elements: three float32 blocks stay in the first and second cache


def _erf32(x: np.ndarray, y: np.ndarray, square: np.ndarray, total: np.ndarray) -> None:
    np.multiply(x, x, square)
    np.minimum(square, np.float32(16), out=square)
    np.multiply(square, _ERF32[-1], total)
    for c in _ERF32[-2:0:-1]:
        np.add(total, c, total)
        np.multiply(total, square, total)
    np.add(total, _ERF32[0], total)
    np.multiply(total, x, total)
    np.tanh(total, y)


def _erf32_blocks(share: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    x, y, square, total = share
    for start in range(0, x.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        count = min(_BLOCK, x.size - start)
        _erf32(x[part], y[part], square[:count], total[:count])


def _horner(coefficients: tuple[float, ...], u: np.ndarray) -> np.ndarray:
    total = np.full_like(u, coefficients[-1])
    for c in coefficients[-2::-1]:
        total *= u
        total += c
    return total


def _erf64(x: np.ndarray, y: np.ndarray) -> None:
    magnitude = np.minimum(np.abs(x), 6.0)  # erf(6) is 1 to the last bit
    square = magnitude * magnitude
    small = x * _horner(_ERF64_SMALL, np.minimum(square, 1.0))
    large = np.copysign(1.0 - _erfc_large(magnitude, square), x)
    np.copyto(y, np.where(magnitude <= 1.0, small, large))
    np.copyto(y, x, where=np.isnan(x))


def _erfc_large(magnitude: np.ndarray, square: np.ndarray) -> np.ndarray:
    t = 2.0 / (2.0 + np.maximum(magnitude, 1.0))
    large: np.ndarray = t * np.exp(_horner(_ERF64_LARGE, t) - square)
    return large


def erf_steps(b: Bind, x: np.ndarray, y: np.ndarray) -> None:
    """Record erf(x) -> y, both float32 or both float64 and of one shape; y may be x."""
    if x.dtype == np.float64:
        b.step(_erf64, x, y)
        return
    if x.flags.c_contiguous and y.flags.c_contiguous:
        count = min(x.size, _BLOCK)
        x, y = x.reshape(-1), y.reshape(-1)  # C-contiguous: reshape gives views
        shares = parts(x.size, b.shares(x.size * _ERF_TIME))
        room = [(b.scratch((count,), x.dtype), b.scratch((count,), x.dtype)) for _ in shares]
        b.at_once(_erf32_blocks, [(x[part], y[part], *own) for part, own in zip(shares, room, strict=True)])
        return
    b.step(_erf32, x, y, b.scratch(x.shape, x.dtype), b.scratch(x.shape, x.dtype))


@kernel("Erf", dtypes={0: FLOATS}, compiled="elementwise")
def erf(b: Bind, p: None) -> None:
    """The Gauss error function, relative error 4e-7 in float32, 2e-15 in float64."""
    x = b.array(0)
    if in_one_pass(b, "Erf", x):
        return
    wide = widened(b, x)
    y = b.reuse(0, 0)
    if wide is x:
        erf_steps(b, x, y)
    else:
        erf_steps(b, wide, wide)
        b.step(convert, y, wide)
