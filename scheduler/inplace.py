"""The caller's own arrays, used where they lie: which inputs need no copy, and which results are written in place.

An input is read where it lies if that is memory that the workers map: the user memory of this process
(`InferenceSession.empty`, `OrtValue`), or an output pool of this generation (results of this session). A result is
written in place if it is bound to memory that its worker can write: the output pool of that worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import onnx_name
from outrider.scheduler.errors import DtypeMismatchError, ShapeMismatchError
from outrider.shm.segment import ALIGN, Segment, address_of

PLACES = 12
"""Places that an input of a slot may have at a time: a worker binds code to each, which costs more than a copy."""
FORGOTTEN = 64
"""After so many runs of the slot without it a place makes room for another."""

Array = np.ndarray[Any, Any]


class Reach:
    """Which memory that the workers can read an array of the caller's lies in."""

    def __init__(self, memories: Mapping[int, Segment]) -> None:
        """`memories`: number in layouts -> this process's mapping."""
        self._spans = [(one.address, one.address + one.nbytes, number) for number, one in memories.items()]

    def find(self, array: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        """(memory, offset) of a C-contiguous array that begins at a multiple of 64; None for any other."""
        address = address_of(array)
        for start, end, memory in self._spans:
            if start <= address < end:
                if (address - start) % ALIGN or address + array.nbytes > end or not array.flags.c_contiguous:
                    return None
                return memory, address - start
        return None


class Admission:
    """Which places an input of one slot is read at: a caller with ever new ones is better served by a copy."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[tuple[int, int], int] = {}  # (memory, offset) -> its last turn, the least recent first

    def admits(self, place: tuple[int, int]) -> bool:
        """True if the input of this run may be read at `place`, (memory, offset)."""
        self._turn += 1
        if place not in self._last and len(self._last) >= PLACES:
            oldest = next(iter(self._last))
            if self._turn - self._last[oldest] <= FORGOTTEN:
                return False
            del self._last[oldest]
        self._last.pop(place, None)
        self._last[place] = self._turn
        return True


class Targets:
    """Outputs that are bound to memory: name -> array."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)


def check_target(name: str, target: Array, made: str, shape: tuple[int, ...]) -> None:
    """Raise DtypeMismatchError or ShapeMismatchError if an output of dtype `made` does not fit its target."""
    bound = onnx_name(target.dtype)
    if made != bound:
        message = f"output {name!r} is {made}, it was bound to {bound}; what it is bound to was not written."
        raise DtypeMismatchError(message, name=name, expected=made, got=bound)
    if shape != target.shape:
        message = (
            f"output {name!r} has shape {list(shape)} in this run, it was bound to memory of shape "
            f"{list(target.shape)}; what it is bound to was not written."
        )
        raise ShapeMismatchError(message, name=name, expected=shape, got=target.shape)


def disjoint(spans: list[tuple[int, int, int]], memory: int, offset: int, nbytes: int) -> bool:
    """True if the bytes lie in none of `spans`, (memory, offset, bytes) each."""
    return not any(
        one == memory and at < offset + nbytes and offset < at + size for one, at, size in spans if size and nbytes
    )
