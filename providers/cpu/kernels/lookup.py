"""Rows of a table by number: what a one-hot product comes to."""

from __future__ import annotations

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.wire.dtypes import FLOATS


@kernel("Lookup", domain="outrider", dtypes={0: ("int32", "int64"), 1: FLOATS})
def lookup(b: Bind, p: None) -> None:
    """`outrider::Lookup` [x, table]: row x + 1 of the table for x of [..., 1]; y is [..., columns]. Exact.

    The first row of the table stands for all numbers below 0, the last one for all that are too large.
    """
    x, table = b.array(0), b.contiguous(b.array(1))
    y = b.out(0, (*x.shape[:-1], table.shape[1]), table.dtype)
    rows = b.scratch(x.shape, np.int64)
    b.step(np.clip, x, -1, len(table) - 2, rows)
    b.step(np.add, rows, 1, rows)
    numbers = rows.reshape(rows.shape[:-1])  # a view: scratch is C-contiguous
    b.step(np.take, table, numbers, 0, y, "clip")
