"""The states of values while a block is bound.

- KNOWN: contents are known now: constants, `Shape`, and whatever deterministic kernels make of such;
- FIXED: address, dtype and shape are known now, contents in the run;
- LATE: all of that is known in the run only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.shm.segment import address_of

KNOWN, FIXED, LATE = "known", "fixed", "late"


class Root:
    """One allocated piece of scratch memory. `readers`: reads left, of all values that lie in it."""

    __slots__ = ("offset", "start", "end", "readers")

    def __init__(self, offset: int, start: int, nbytes: int) -> None:
        self.offset = offset
        self.start = start
        self.end = start + nbytes
        self.readers = 0


class Item:
    """The state of one value. `shared`: KNOWN and the same for every signature. `root`: the memory of a FIXED value."""

    __slots__ = ("state", "value", "root", "shared")

    def __init__(self, state: str, value: Any = None, root: Root | None = None, shared: bool = False) -> None:
        self.state = state
        self.value = value
        self.root = root
        self.shared = shared


LATE_ITEM = Item(LATE)


def fixed_size(value: Any) -> bool:
    """True for an array whose elements have a fixed size: no strings, sequences or None."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def plain(item: Item) -> bool:
    """True for what a bound kernel may see: an array of fixed-size elements at a fixed address, or nothing."""
    if item.state == LATE:
        return False
    return item.value is None or fixed_size(item.value)


def alike(a: Item, b: Item) -> bool:
    """True when an op cannot tell two items apart: the same contents where known, else the same memory."""
    if a is b:
        return True
    if a.state != b.state or a.root is not b.root or a.shared != b.shared:
        return False
    x, y = a.value, b.value
    if x is y:
        return True
    if not fixed_size(x) or not fixed_size(y) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    if a.state == KNOWN:
        return bool(x.tobytes() == y.tobytes())
    return x.strides == y.strides and address_of(x) == address_of(y)
