"""Prepacked weights: made once per worker, and what they were made from is let go.

Units of one worker that read the same constant share what is made of it by the same operator. What is shared lives as
long as a unit that uses it. A constant lies in a mapping of the model's file or of its weight segment; after packing,
its pages leave the worker's resident memory: who reads them again gets them from there again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from outrider.providers.wire.graph import Node
from outrider.shm import memory
from outrider.shm.segment import address_of
from outrider.shm.weights import let_go, mapping_of

LARGE = 1 << 24  # bytes of a weight from which on memory is looked at before it is packed
_LEAST = 1 << 16  # bytes of a weight that is let go


class Packed:
    """What a kernel made of a constant of `source` bytes. `nbytes`: of all arrays in it that are not the constant's.

    `mapping`: what a shared one was made from, which therefore keeps its addresses.
    """

    __slots__ = ("value", "source", "nbytes", "mapping", "__weakref__")

    def __init__(self, value: Any, array: np.ndarray, mapping: Any) -> None:
        self.value = value
        self.source = array.nbytes
        self.nbytes = sum(part.nbytes for part in _arrays(value) if not np.may_share_memory(part, array))
        self.mapping = mapping


class Packing:
    """The packed weights that units of one worker share."""

    def __init__(self) -> None:
        self._shared: WeakValueDictionary[Hashable, Packed] = WeakValueDictionary()

    def packed(
        self, step: Node, key: str, i: int, constants: Sequence[np.ndarray | None], make: Callable[[np.ndarray], Any]
    ) -> Packed:
        """`make(constants[i])` for input `i` of a node. `constants`: its inputs, None where it is not a constant.

        The same node, `key` and constants give the same. Raises OutOfMemoryError before it is made of a large one.
        """
        array = constants[i]
        assert array is not None
        mapping = mapping_of(array)
        identity = None if mapping is None else _identity(step, key, i, constants)
        found = None if identity is None else self._shared.get(identity)
        if found is not None:
            return found
        if array.nbytes >= LARGE:
            memory.check(f"packed {step.inputs[i].name}", array.nbytes)
        made = Packed(make(array), array, mapping)
        if identity is not None:
            self._shared[identity] = made
        if made.nbytes >= _LEAST:
            let_go(array)
        return made


def _identity(step: Node, key: str, i: int, constants: Sequence[np.ndarray | None]) -> Hashable | None:
    """What decides what a kernel makes of a constant; None where that cannot be told."""
    attributes = _plain(step.attributes)
    if attributes is None:
        return None
    places: list[tuple[Any, ...] | None] = []
    for array in constants:
        if array is None:
            places.append(None)
        elif mapping_of(array) is None:  # its address may be another array's tomorrow
            return None
        else:
            places.append((address_of(array), array.dtype.str, array.shape, array.strides))
    return step.domain, step.op_type, step.opset, attributes, key, i, tuple(places)


def _plain(attributes: Mapping[str, Any]) -> Hashable | None:
    """The attributes as something to compare; None if one is an array or a body."""
    pairs = []
    for name, value in sorted(attributes.items()):
        item = tuple(value) if isinstance(value, (list, tuple)) else value
        parts = item if isinstance(item, tuple) else (item,)
        if not all(isinstance(part, (int, float, str, bytes, type(None))) for part in parts):
            return None
        pairs.append((name, repr(item)))
    return tuple(pairs)


def _arrays(value: Any) -> list[np.ndarray]:
    """The arrays in what a kernel made: alone, or in tuples, lists, dicts and dataclasses."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if not isinstance(value, (tuple, list)):
        return []
    return [array for item in value for array in _arrays(item)]
