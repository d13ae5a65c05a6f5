"""When two results agree: the one definition that `--expect` and the tests use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import onnx_name

TOLERANCE = 1e-3


def agree(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> str | None:
    """None if `ours` agrees with `theirs`, else the reason in words.

    Same shape and dtype; what is not floating point is equal; floats (and complex numbers) have
    max|ours - theirs| <= tolerance * max|theirs| over all finite elements, with NaN and infinities at the same places.
    Sequences and maps agree if their items do; None agrees with None only.
    """
    if ours is None or theirs is None:
        return None if ours is None and theirs is None else f"{_kind(ours)} instead of {_kind(theirs)}"
    if isinstance(theirs, Mapping) or isinstance(ours, Mapping):
        return _maps(ours, theirs, tolerance)
    if isinstance(theirs, (list, tuple)) or isinstance(ours, (list, tuple)):
        return _sequences(ours, theirs, tolerance)
    return _arrays(np.asarray(ours), np.asarray(theirs), tolerance)


def _kind(item: Any) -> str:
    if item is None:
        return "an empty optional"
    return "a map" if isinstance(item, Mapping) else "a sequence" if isinstance(item, (list, tuple)) else "a tensor"


def _maps(ours: Any, theirs: Any, tolerance: float) -> str | None:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return f"{_kind(ours)} instead of {_kind(theirs)}"
    if set(ours) != set(theirs):
        return f"the keys are {sorted(ours)} instead of {sorted(theirs)}"
    return _first_reason((key, agree(ours[key], theirs[key], tolerance)) for key in theirs)


def _sequences(ours: Any, theirs: Any, tolerance: float) -> str | None:
    if not isinstance(ours, (list, tuple)) or not isinstance(theirs, (list, tuple)):
        return f"{_kind(ours)} instead of {_kind(theirs)}"
    if len(ours) != len(theirs):
        return f"{len(ours)} items instead of {len(theirs)}"
    return _first_reason((i, agree(a, b, tolerance)) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))


def _first_reason(reasons: Any) -> str | None:
    return next((f"item {key!r}: {reason}" for key, reason in reasons if reason is not None), None)


def _arrays(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], tolerance: float) -> str | None:
    ours, theirs = _text(ours), _text(theirs)
    if ours.dtype.newbyteorder("=") != theirs.dtype.newbyteorder("="):
        return f"dtype {_name(ours)} instead of {_name(theirs)}"
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} instead of {list(theirs.shape)}"
    if ours.size == 0:
        return None
    if not _is_inexact(ours):
        differing = int(np.count_nonzero(ours != theirs))
        return f"{differing} of {ours.size} elements differ" if differing else None
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    a, b = ours.astype(wide), theirs.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "NaN or infinity at other places"
    if not np.all(np.isfinite(a[finite])):
        return "NaN or infinity where a finite number belongs"
    error = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0))
    bound = tolerance * float(np.max(np.abs(b[finite]), initial=0.0))
    return None if error <= bound else f"max|difference| {error:.3g} is over {bound:.3g}"


def _text(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Strings in one form, object arrays."""
    return array.astype(object) if array.dtype.kind in "UT" else array


def _name(array: np.ndarray[Any, Any]) -> str:
    try:
        return onnx_name(array.dtype.newbyteorder("="))
    except ValueError:  # a numpy dtype that ONNX does not have
        return str(array.dtype)


def _is_inexact(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "fc" or "float" in array.dtype.name
