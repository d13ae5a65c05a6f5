"""What products of 8-bit integers are made of: operands with zero points, and what becomes of the sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.epilogue import Epilogue
from outrider.providers.cpu.kernels.frame import Bind

BYTES = {"int8", "uint8"}
# Positions of the inputs of outrider::IntegerMatMul and IntegerConv after those of `epilogue.py`; P: of the product;
# SUM_BIAS: int32, added to the sums.
X_SCALE, X_ZERO, W_SCALE, W_ZERO, Y_SCALE, Y_ZERO, P_SCALE, P_ZERO, SUM_BIAS = range(6, 15)


@dataclass(frozen=True)
class Quantized:
    """Input `i` and its zero point, input `zero_input` (`zero` None: 0), several along `axis` of the operand.

    `pick`, called `picked`, makes the operand of the contents of the input. Without positions: made in the run.
    """

    i: int | None
    values: np.ndarray
    zero: np.ndarray | None
    zero_input: int | None
    axis: int | None
    pick: Callable[[np.ndarray], np.ndarray] | None = None
    picked: str = ""

    def of(self, contents: np.ndarray) -> np.ndarray:
        """The operand in the contents of the input."""
        return contents if self.pick is None else self.pick(contents)

    def broadcast(self) -> np.ndarray | None:
        """The zero point, ready to broadcast over the values."""
        return None if self.zero is None else along(self.zero, self.values.ndim, self.axis)

    def magnitude(self, b: Bind) -> int:
        """An upper bound of |value - zero point|."""
        info = np.iinfo(self.values.dtype)
        if self.zero is None:
            return max(-int(info.min), int(info.max))
        if self.zero_input is not None and b.is_const(self.zero_input) and self.zero.size:
            points = b.const(self.zero_input).astype(np.int64)
            return max(int(info.max) - int(points.min()), int(points.max()) - int(info.min))
        return int(info.max) - int(info.min)

    def known(self, b: Bind) -> bool:
        """Values and zero point are constant."""
        if self.i is None or not b.is_const(self.i):
            return False
        return self.zero is None or (self.zero_input is not None and b.is_const(self.zero_input))

    def key(self, b: Bind) -> str:
        """What to call things made of this operand, beside its position."""
        if self.zero is None or self.zero_input is None:
            return self.picked
        return f"{self.picked} {b.node.inputs[self.zero_input].name} {self.zero.shape} {self.axis}"


def operand(b: Bind, i: int, zero_input: int, axis: int | None) -> Quantized:
    """Input i; a zero point with several entries lies along `axis` of it (None: it broadcasts as it is)."""
    zero = b.contiguous(b.array(zero_input)) if b.has(zero_input) else None
    return Quantized(i, b.array(i), zero, zero_input, axis)


def along(x: np.ndarray, rank: int, axis: int | None) -> np.ndarray:
    """A C-contiguous scale or zero point, ready to broadcast along `axis` of a tensor of that rank."""
    if x.size == 1:
        return x.reshape(())
    if x.ndim == 1 and axis is not None:
        return x.reshape(tuple(x.shape[0] if k == axis % rank else 1 for k in range(rank)))
    return x


@dataclass(frozen=True)
class Result:
    """What becomes of the sums. Arrays are C-contiguous inputs, read in the run.

    int32: nothing. Else sums + `bias` (int32, by feature) times x_scale w_scale; plus input `shift` (float32, by
    feature); rounded to what the type of p_zero holds, where p_scale and p_zero are given; then `epilogue`, whose
    inputs have the positions of `epilogue.py`; float32 unless y_scale and y_zero are given: quantized by them. Scales
    have one value, w_scale may have one per feature, x_scale and y_scale one per row.
    """

    dtype: Any
    x_scale: np.ndarray | None = None
    w_scale: np.ndarray | None = None
    bias: np.ndarray | None = None
    shift: int | None = None
    epilogue: Epilogue | None = None
    y_scale: np.ndarray | None = None
    y_zero: np.ndarray | None = None
    p_scale: np.ndarray | None = None
    p_zero: np.ndarray | None = None

    @property
    def direct(self) -> bool:
        """The sums are quantized with one multiplication."""
        return self.y_scale is not None and self.shift is None and self.epilogue is None
