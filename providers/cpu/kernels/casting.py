"""Casts between element types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.blockwise import Program, blockwise, reads, scalar_operand, takes
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import convert
from outrider.providers.wire.dtypes import BY_NUMBER, numpy_dtype
from outrider.providers.wire.graph import Node

# Largest finite values of the float8 types (ONNX, "Float stored in 8 bits").
FLOAT8_MAX = {"float8e4m3fn": 448.0, "float8e4m3fnuz": 240.0, "float8e5m2": 57344.0, "float8e5m2fnuz": 57344.0}
_NO_SHAPE: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """An element type to convert to; `saturate` clips to the finite range of the float8 types.

    `rounding` ('up', 'down' or 'nearest') is that of float8e8m0, whose values are powers of two.
    """

    name: str
    saturate: bool
    rounding: str = "up"

    def limit(self) -> float | None:
        """The value to clip to, None where overflow follows the type (infinity or NaN)."""
        return FLOAT8_MAX.get(self.name) if self.saturate else None


def _target(number: Any) -> str:
    name = BY_NUMBER.get(int(number), "")
    if not name or name == "undefined":
        raise Unsupported(f"element type {number} is not known here")
    return name


def _parse_cast(node: Node) -> Target:
    name = node.inputs[1].dtype if node.op_type == "CastLike" else _target(node.attributes["to"])
    rounding = str(node.attributes.get("round_mode", "up"))
    if rounding not in ("up", "down", "nearest"):
        raise Unsupported(f"round_mode={rounding!r}, the kernel takes 'up', 'down' and 'nearest'")
    return Target(name, bool(node.attributes.get("saturate", 1)), rounding)


def _text(value: Any) -> str:
    """One number as ONNX writes it: shortest form that reads back, `NaN`, `INF`, `-INF`."""
    if isinstance(value, (float, np.floating)):
        if np.isnan(value):
            return "NaN"
        if np.isinf(value):
            return "INF" if value > 0 else "-INF"
    return str(value)


def _texts(x: np.ndarray) -> np.ndarray:
    wide = x if x.dtype.kind in "biuf" else x.astype(np.float32)
    result = np.empty(x.shape, object)
    result.reshape(-1)[:] = [_text(v) for v in wide.reshape(-1)]
    return result


def _numbers(x: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    read: Any = int if dtype.kind in "iu" else float
    return np.array([read(str(v)) for v in x.reshape(-1)]).astype(dtype).reshape(x.shape)


def clipped(y: np.ndarray, x: np.ndarray, limit: float) -> None:
    """Step: `x` into the float8 array `y`, values beyond `limit` becoming it."""
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    np.copyto(y, np.clip(wide, -limit, limit), "unsafe")  # NaN stays


def _power_of_two(y: np.ndarray, x: np.ndarray, target: Target) -> None:
    bits = x.astype(np.float32).view(np.uint32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if target.rounding == "up":
        higher = fraction > 0
    elif target.rounding == "nearest":  # a tie goes up, except between 0 and the smallest power
        higher = (fraction > 0x400000) | ((fraction == 0x400000) & (exponent > 0))
    else:
        higher = np.zeros(x.shape, bool)
    top = 0xFE if target.saturate else 0xFF  # 0xFF is NaN
    raised = np.where(exponent < 0xFF, np.minimum(exponent + higher, top), 0xFF)
    if target.saturate:
        raised = np.where(np.isinf(x.astype(np.float32)), top, raised)
    np.copyto(y, raised.astype(np.uint8).view(y.dtype))


def _by_float32(y: np.ndarray, x: np.ndarray) -> None:
    np.copyto(y, x.astype(np.float32), "unsafe")


def _castable(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    try:
        np.empty(_NO_SHAPE, source).astype(target)
    except (TypeError, ValueError):
        return False
    return True


def _cast(b: Bind, target: Target) -> None:
    x = b.array(0)
    if target.name == "string":
        b.value(0, lambda: x if x.dtype == object else _texts(x))
        return
    dtype = numpy_dtype(target.name)
    if x.dtype == object:
        b.value(0, lambda: _numbers(x, dtype))
        return
    if x.dtype == dtype:
        b.view(0, x)
        return
    library = b.compiled("elementwise")
    if library is not None and reads(x) and dtype in (np.float32, np.bool_) and takes(x.shape, []):
        program: Program = [("Copy", 0)] if dtype == np.float32 else [("NotEqual", 0, 1)]
        blockwise(b, library, program, [x, scalar_operand(0)][: len(program[0]) - 1], 1, dtype)
        return
    y = b.out(0, x.shape, dtype)
    limit = target.limit()
    if target.name == "float8e8m0":
        b.step(_power_of_two, y, x, target)
    elif limit is not None:
        b.step(clipped, y, x, limit)
    else:
        b.step(convert if _castable(x.dtype, dtype) else _by_float32, y, x)


@kernel("Cast", since=6, parse=_parse_cast, compiled="elementwise")
def cast(b: Bind, p: Target) -> None:
    """Cast-25: C casts, float8 saturating unless told otherwise."""
    _cast(b, p)


@kernel("CastLike", since=15, parse=_parse_cast, compiled="elementwise")
def cast_like(b: Bind, p: Target) -> None:
    """CastLike-25: cast to the dtype of the second input."""
    _cast(b, p)


def _parse_bit_cast(node: Node) -> str:
    name = _target(node.attributes["to"])
    if "string" in (name, node.inputs[0].dtype):
        raise Unsupported("strings have no bits to reinterpret")
    return name


@kernel("BitCast", since=26, parse=_parse_bit_cast)
def bit_cast(b: Bind, p: str) -> None:
    """BitCast-26: the same bits as another element type of the same width."""
    x = b.array(0)
    dtype = numpy_dtype(p)
    if dtype.itemsize != x.dtype.itemsize:
        raise ValueError(f"BitCast {b.node.name}: {x.dtype} and {dtype} differ in width")
    b.view(0, x.view(dtype))
