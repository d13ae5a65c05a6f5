"""The states of values while a block is bound.

- KNOWN: contents are known now: constants, `Shape`, and whatever deterministic kernels make of such;
- FIXED: address, dtype and shape are known now, contents in the run;
- LATE: all of that is known in the run only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

KNOWN, FIXED, LATE = "known", "fixed", "late"


class Root:
    """One allocated block. `readers`: reads left, of all values that lie in it."""

    __slots__ = ("offset", "start", "end", "readers")

    def __init__(self, offset: int, start: int, nbytes: int) -> None:
        self.offset = offset
        self.start = start
        self.end = start + nbytes
        self.readers = 0


class Item:
    """The state of one value. `shared`: KNOWN and the same for every signature. `root`: the block of a FIXED value."""

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
