"""Rows of a table by number: what a one-hot product comes to."""

from __future__ import annotations

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.wire.dtypes import FLOATS


@kernel("Lookup", domain="outrider", dtypes={0: ("int32", "int64"), 1: FLOATS})
def lookup(b: Bind, p: None) -> None:
    """`outrider::Lookup` [x, table]: one_hot(x) @ table for x of [..., 1] and a table of [rows, columns], both finite.

    A number that is no row gives zeros. Exact.
    """
    x = b.array(0)
    table = b.packed("framed", 1, _framed)
    y = b.out(0, (*x.shape[:-1], table.shape[1]), table.dtype)
    rows = b.scratch(x.shape, np.int64)
    b.step(np.clip, x, -1, len(table) - 2, rows)
    b.step(np.add, rows, 1, rows)
    numbers = rows.reshape(rows.shape[:-1])  # a view: scratch is C-contiguous
    b.step(np.take, table, numbers, 0, y, "clip")


def _framed(table: np.ndarray) -> np.ndarray:
    """The table between two rows of zeros."""
    return np.pad(table, ((1, 1), (0, 0)))
