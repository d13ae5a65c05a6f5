"""Whether what arrived is what the model declares: layouts when their record is first met, other values each time.

Dtypes and ranks are compared. Dimensions are not: models that were edited tell wrong ones, and run all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy as np

from outrider.providers.wire.dtypes import BY_NUMBER, is_string, is_tensor, numpy_dtype
from outrider.providers.wire.graph import Value
from outrider.shm.board import ENCODED, NONE, OWN, Layout


class Declarations:
    """What the model declares of the edges of one board: `edges`, by number, may grow."""

    def __init__(self, edges: Mapping[int, Value] | None = None) -> None:
        self.edges = dict(edges or {})

    def misfit(self, edge: int, layout: Layout) -> str:
        """`layout_misfit` for a BoardReader; nothing is wrong with an edge that is not among them."""
        declared = self.edges.get(edge)
        return "" if declared is None else layout_misfit(declared, layout)


class PooledDeclarations(Declarations):
    """The same for a board of which some edges, `pooled`, may have their values in an output pool.

    All blocks of the pool end before `limit`. What lies there in none is for whoever knows what was bound there.
    """

    def __init__(self, edges: Mapping[int, Value], pooled: Collection[int], limit: int) -> None:
        super().__init__(edges)
        self._pooled = frozenset(pooled)
        self._limit = limit

    def misfit(self, edge: int, layout: Layout) -> str:
        """`layout_misfit`, and whether the value may lie where it does."""
        if layout.memory != OWN and edge not in self._pooled:
            return "it lies in an output pool, and is not for the caller only"
        if layout.block is not None and layout.offset + layout.nbytes > self._limit:
            return f"block {layout.block} ends at {layout.offset + layout.nbytes}, blocks lie below {self._limit}"
        return super().misfit(edge, layout)


def layout_misfit(declared: Value, layout: Layout) -> str:
    """Why a layout cannot be that of a declared value; '' if it can. Whoever asks builds an array on it next."""
    wrapper, inner = _type_of(declared.dtype)
    optional = wrapper == "optional"
    if layout.kind == NONE:
        return "" if optional or declared.dtype == "undefined" else f"it is no value, {declared.dtype} is declared"
    kind = inner if optional else declared.dtype
    if layout.kind == ENCODED:
        plain = is_tensor(kind) and kind != "string"
        return f"it is encoded, {declared.dtype} is declared" if plain else ""
    name = BY_NUMBER.get(layout.dtype, "")
    if not is_tensor(name) or name == "string":
        return f"dtype number {layout.dtype} is none of a tensor's"
    if layout.itemsize != numpy_dtype(name).itemsize:
        return f"an element of {name} does not have {layout.itemsize} bytes"
    if kind not in ("undefined", name):
        return f"its dtype is {name}, {declared.dtype} is declared"
    if declared.shape is not None and len(declared.shape) != len(layout.shape):
        return f"its rank is {len(layout.shape)}, {len(declared.shape)} is declared"
    return ""


def value_misfit(declared: Value, item: Any) -> str:
    """Why a decoded value (object array, list, dict, None, or what they hold) is not as declared; '' if it is."""
    if not has_type(item, declared.dtype):
        return f"it is {told(item)}, {declared.dtype} is declared"
    if declared.shape is not None and isinstance(item, np.ndarray) and item.ndim != len(declared.shape):
        return f"its rank is {item.ndim}, {len(declared.shape)} is declared"
    return ""


def has_type(item: Any, dtype: str) -> bool:
    """True if a value is of the declared type, as far as that says anything."""
    wrapper, inner = _type_of(dtype)
    if wrapper == "optional":
        return item is None or has_type(item, inner)
    if wrapper == "sequence":
        return isinstance(item, (list, tuple)) and all(has_type(one, inner) for one in item)
    if wrapper == "map":
        return isinstance(item, dict)
    if wrapper or not is_tensor(dtype):
        return True  # nothing is known of it
    if isinstance(item, (str, bytes)):
        return dtype == "string"
    if not isinstance(item, (np.ndarray, np.generic)):
        return False
    return is_string(item.dtype) if dtype == "string" else item.dtype == numpy_dtype(dtype)


def told(item: Any) -> str:
    """What a value is, for a message."""
    return f"an array of {item.dtype}" if isinstance(item, np.ndarray) else f"a {type(item).__name__}"


@cache
def _type_of(dtype: str) -> tuple[str, str]:
    """('sequence', 'float32') for 'sequence(float32)'; ('', dtype) for an element type."""
    wrapper, bracket, inner = dtype.partition("(")
    return (wrapper, inner[:-1]) if bracket else ("", dtype)
