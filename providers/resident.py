"""Values of a provider's own, such as memory of its device, that pass between its units without leaving it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import NUMBER, onnx_name


def is_foreign(value: Any) -> bool:
    """True for what is none of the forms in which ONNX values arrive."""
    return value is not None and not isinstance(value, (np.ndarray, np.generic, list, tuple, dict, str, bytes))


def form_of(value: Any) -> tuple[str, tuple[int, ...]]:
    """The ONNX dtype and the shape of such a value, by its attributes. Raises TypeError where they do not tell."""
    what = type(value).__name__
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        raise TypeError(f"a {what} without dtype and shape")
    try:
        name = dtype if isinstance(dtype, str) and dtype in NUMBER else onnx_name(np.dtype(dtype))
    except (TypeError, ValueError):
        raise TypeError(
            f"a {what} whose dtype is {dtype!r:.60}, neither a name like 'float32' nor a NumPy dtype"
        ) from None
    try:
        dims = tuple(int(dim) for dim in shape)
    except (TypeError, ValueError):
        raise TypeError(f"a {what} whose shape is {shape!r:.60}, no tuple of numbers") from None
    return name, dims


def signature_of(value: Any) -> Any:
    """What programs are told apart by: dtype and shape of arrays and of values of the provider's own, else the type."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return (type(value), *form_of(value)) if is_foreign(value) else type(value)


class Resident:
    """What partitions of this worker left for later ones of it in the same run, by edge and slot.

    A value is dropped when all have read it; `readers` says how many do, by edge of this worker's board.
    """

    def __init__(self, readers: Mapping[int, int]) -> None:
        self.run = 0  # the run that is being served
        self._readers = readers
        self._kept: dict[tuple[int, int], list[Any]] = {}  # [run, value, readers left]

    def keep(self, edge: int, slot: int, value: Any) -> None:
        """Leave a value, in place of that of an earlier run."""
        self._kept.pop((edge, slot), None)
        count = self._readers.get(edge, 0)
        if count:
            self._kept[edge, slot] = [self.run, value, count]

    def take(self, edge: int, slot: int) -> Any:
        """The value that was left in this run for one reader more; None without one."""
        entry = self._kept.get((edge, slot))
        if entry is None or entry[0] != self.run:
            return None
        entry[2] -= 1
        if not entry[2]:
            del self._kept[edge, slot]
        return entry[1]
