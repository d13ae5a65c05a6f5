"""The suite's own idea of a right answer: same count, kind, shape and dtype; close within its tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

TWO_BFLOAT16_STEPS = 2.0**-6


def difference(expected: Sequence[Any], got: Sequence[Any], rtol: float, atol: float) -> str | None:
    """None if `got` is right, else where and how it differs first. Sequences are compared item by item."""
    if len(expected) != len(got):
        return f"{len(got)} values instead of {len(expected)}"
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        reason = _one(want, have, rtol, atol)
        if reason is not None:
            return f"[{i}] {reason}"
    return None


def _one(want: Any, have: Any, rtol: float, atol: float) -> str | None:
    if want is None or isinstance(want, list):
        if want is None and have is None:
            return None
        if isinstance(want, list) and isinstance(have, list):
            return difference(want, have, rtol, atol)
        return f"{type(have).__name__} instead of {type(want).__name__}"
    if not isinstance(have, np.ndarray):
        return f"{type(have).__name__} instead of an array"
    if have.shape != want.shape:
        return f"shape {have.shape} instead of {want.shape}"
    if have.dtype != want.dtype:
        return f"dtype {have.dtype} instead of {want.dtype}"
    if want.dtype.kind in "Ob":
        return None if np.array_equal(want, have) else f"{_count(want != have)} unequal"
    if want.dtype.kind == "V":  # the types of ml_dtypes, which numpy cannot promote
        if want.dtype.name == "bfloat16":
            rtol = max(rtol, TWO_BFLOAT16_STEPS)
        want, have = want.astype(np.float32), have.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        right = np.isclose(have, want, rtol=rtol, atol=atol, equal_nan=True)
    if right.all():
        return None
    where = tuple(int(i) for i in np.argwhere(~right)[0]) if right.ndim else ()
    return f"{_count(~right)} beyond tolerance, first at {where}: {have[where]} instead of {want[where]}"


def _count(wrong: Any) -> str:
    wrong = np.asarray(wrong)
    return f"{int(wrong.sum())} of {wrong.size} elements"
