"""Inputs for a provider that may overwrite them: copies of its own, made before each call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.providers.contract import Run
from outrider.providers.resident import is_foreign
from outrider.shm.segment import ALIGN, address_of

if TYPE_CHECKING:
    from outrider.providers.binding import Counters

KEPT = 64  # buffers


class Privates:
    """The buffers of one unit, whose calls come one after the other. Copies are counted."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._buffers: dict[tuple[int, np.dtype[Any], tuple[int, ...]], np.ndarray] = {}

    def of(self, inputs: Sequence[Any]) -> list[Any]:
        """What a program is bound to in place of these: for a tensor a writable, C-contiguous, 64-byte aligned array,
        whose contents mean nothing yet; for the rest copies."""
        return [self._buffer(i, item) if _is_tensor(item) else _copied(item) for i, item in enumerate(inputs)]

    def before(self, run: Run, bound: Sequence[Any]) -> Run:
        """`run`, which was bound to `bound`, on copies of what it is called with."""
        tensors = [i for i, item in enumerate(bound) if _is_tensor(item)]
        nbytes = sum(bound[i].nbytes for i in tensors)

        def call(values: Sequence[Any]) -> Sequence[Any]:
            for i in tensors:
                np.copyto(bound[i], values[i])
            self._counters.copies += len(tensors)
            self._counters.copied_bytes += nbytes
            return run([bound[i] if _is_tensor(item) else _copied(item) for i, item in enumerate(values)])

        return call

    def _buffer(self, i: int, item: np.ndarray) -> np.ndarray:
        key = i, item.dtype, item.shape
        buffer = self._buffers.pop(key, None)
        if buffer is None:
            buffer = aligned(item.dtype, item.shape)
            if len(self._buffers) >= KEPT:
                self._buffers.pop(next(iter(self._buffers)))
        self._buffers[key] = buffer
        return buffer


def _is_tensor(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.dtype != object


def _copied(item: Any) -> Any:
    """What is the provider's own is not for others to copy."""
    return item if is_foreign(item) else copy.deepcopy(item)


def aligned(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """New memory for an array, C-contiguous and 64-byte aligned."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.empty(count + ALIGN, np.uint8)
    start = -address_of(room) % ALIGN
    return np.ndarray(shape, dtype, buffer=room.data, offset=start) if count else np.empty(shape, dtype)
