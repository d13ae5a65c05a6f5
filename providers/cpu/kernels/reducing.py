"""Reductions of float32 by the compiled library, along neighbouring axes."""

from __future__ import annotations

import math

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind

SUM, SQUARES, MAGNITUDES, LARGEST, SMALLEST = range(5)  # as reduce.c has them
_CHUNK = 32  # results along the last axis that one item of work makes
_MOST_AXES = 8


def compiled_reduction(
    b: Bind, x: np.ndarray, axes: tuple[int, ...], y: np.ndarray, what: int, divisor: float = 1.0, root: bool = False
) -> bool:
    """Record y = what(x over axes) / divisor, or the root of it; False where the library does not take it.

    y has the rank of x, 1 on the reduced axes, and any strides. Taken are axes that follow one another. The bits do not
    depend on the strides of x.
    """
    library = b.compiled("reduce")
    long = [axis for axis in axes if x.shape[axis] > 1]
    if library is None or x.dtype != np.float32 or not y.size or not x.size or x.ndim > _MOST_AXES:
        return False
    if not long:
        plain = what in (SUM, LARGEST, SMALLEST) and divisor == 1 and not root
        if plain:
            b.copy(y, x)
        return plain
    if any(x.shape[axis] > 1 for axis in range(long[0], long[-1]) if axis not in long):
        return False
    n = math.prod(x.shape[axis] for axis in long)
    kept = [axis for axis in range(x.ndim) if axis not in axes and x.shape[axis] > 1]
    step = x.strides[long[-1]]
    one = all(x.strides[i] == x.strides[j] * x.shape[j] for i, j in zip(long, long[1:], strict=False))
    if not one or (step != 4 and not any(x.strides[axis] == 4 for axis in kept)):
        x = b.contiguous(x)
        step = x.strides[long[-1]]
    plan: list[tuple[int, int, int]] = []
    for axis in sorted(kept, key=lambda axis: -abs(x.strides[axis])):
        count, y_step, x_step = x.shape[axis], y.strides[axis] // 4, x.strides[axis] // 4
        if plan and plan[-1][1:] == (y_step * count, x_step * count):
            count *= plan.pop()[0]
        plan.append((count, y_step, x_step))
    last = plan.pop() if step != 4 else (1, 0, 0)
    items = math.prod(row[0] for row in plan)
    if step != 4:
        chunks = -(-last[0] // _CHUNK)
        items *= chunks
        plan.append((chunks, last[1] * _CHUNK, _CHUNK))
    elif not plan:
        plan.append((1, 0, 0))
    tasks = library.tasks(items, 0.2 * x.size + 10 * items, 4)
    walked = np.array(plan, np.int64)
    if step == 4:
        b.step(library.call("or_reduce_rows", tasks, y, x, walked, len(plan), n, what, tasks, float(divisor), root))
    else:
        b.step(
            library.call(
                "or_reduce_columns", tasks, y, x, walked, len(plan), n, what, tasks, float(divisor), root,
                step // 4, last[0], last[1],
            )
        )  # fmt: skip
    return True
