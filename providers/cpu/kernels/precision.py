"""In which precision kernels compute: 16-bit floats in float32, rounded once at the end; everything else as it is."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind

_HALVES = ("float16", "bfloat16")


@cache  # the name of a dtype is slow
def wide(dtype: Any) -> np.dtype[Any]:
    """The dtype to compute in: float32 for float16 and bfloat16, else the dtype itself."""
    given = np.dtype(dtype)
    return np.dtype(np.float32) if given.name in _HALVES else given


def cast(b: Bind, x: np.ndarray, dtype: Any) -> np.ndarray:
    """`x` itself when it has this dtype, else a scratch copy that a step refreshes in every run."""
    if x.dtype == dtype:
        return x
    copy = b.scratch(x.shape, dtype)
    b.step(np.copyto, copy, x, "unsafe")
    return copy


def widened(b: Bind, i: int) -> np.ndarray:
    """Input i in the dtype to compute in; a constant is converted once."""
    x = b.array(i)
    dtype = wide(x.dtype)
    if x.dtype == dtype:
        return x
    if b.is_const(i):
        converted: np.ndarray = b.packed(f"as {dtype.name}", i, lambda contents: contents.astype(dtype))
        return converted
    return cast(b, x, dtype)


def target(b: Bind, y: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Where to compute output `y`: in place, or in scratch of the wider dtype that `finish` rounds from."""
    compute = wide(y.dtype) if dtype is None else np.dtype(dtype)
    return y if y.dtype == compute else b.scratch(y.shape, compute)


def finish(b: Bind, y: np.ndarray, computed: np.ndarray) -> None:
    """Round `computed` (of `target`) into `y`, unless it is `y`."""
    if computed is not y:
        b.step(np.copyto, y, computed, "unsafe")
