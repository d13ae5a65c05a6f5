"""Matrix products by the compiled library: any batch, transposed operands where they lie, constant ones packed once.

`gemm.c` and `tiles.h` say how; float32.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.providers.cpu.kernels.epilogue import Epilogue
from outrider.providers.cpu.kernels.frame import Bind
from outrider.providers.cpu.kernels.panels import (
    FLOPS,
    ROWS,
    Operands,
    block_rows,
    epilogue_words,
    packed_size,
    packed_weights,
    panel_count,
)
from outrider.providers.cpu.native import Library


def _dense(x: np.ndarray) -> bool:
    """True when C can take the last two axes as they lie: one of them is contiguous, neither runs backwards."""
    rows, columns = x.strides[-2:]
    return min(rows, columns) >= 0 and (columns == 4 or rows == 4)


def _joined(x: np.ndarray) -> np.ndarray | None:
    """[..., rows, depth] as a view [all rows, depth]; None where only a copy has that."""
    view = x.view()
    try:
        view.shape = (math.prod(x.shape[:-1]), x.shape[-1])  # unlike reshape(), never copies
    except AttributeError:
        return None
    return view


def multiply_compiled(
    b: Bind,
    library: Library,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    p: Epilogue,
    with_: Operands,
    swapped: bool | None,
) -> None:
    """Record y = epilogue(x @ w), not empty, x and w of rank 2 or more.

    x and y are float32, y in C order; w float32, or any float where it is packed.

    `swapped`: w is input 1 of the node as it is (False) or with its last two axes swapped (True), and is packed once if
    it is constant; None where w is something else.
    """
    depth, features = w.shape[-2:]
    packed = swapped is not None and b.is_const(1)
    result = y
    if x.strides[-1] != 4 and depth > 1:
        x = b.contiguous(x)
    if math.prod(w.shape[:-2]) == 1:
        w = w.reshape(w.shape[-2:])
        flat = _joined(x)
        if flat is None:
            x = b.contiguous(x)
            flat = x.reshape(-1, depth)
        x, y = flat, y.reshape(-1, features)
    if not packed and not _dense(w):
        w = b.contiguous(w)
    batches = y.shape[:-2]
    offsets = _offsets(x, w, y, packed, features == 1)
    single = depth if features == 1 else 0
    weights = w
    if packed:
        name = "of a transposed matrix" if swapped else "of a matrix"

        def as_matrices(contents: np.ndarray) -> np.ndarray:
            matrices = contents.swapaxes(-1, -2) if swapped else contents
            return matrices.reshape((-1,) + matrices.shape[-2:])

        shape = (math.prod(w.shape[:-2]), depth, features)
        weights = packed_weights(b, 1, name, shape, single, as_matrices)

    batch, rows = math.prod(batches), y.shape[-2]
    panels = panel_count(features)
    many = library.tasks(1 << 16, 2.0 * batch * rows * depth * features / FLOPS, 4)
    if packed:
        row_parts = min(many, -(-rows // ROWS))
        panel_parts = min(panels, -(-many // (row_parts * batch)))
    else:  # what packs a panel should multiply all rows with it
        panel_parts = min(panels, -(-many // batch))
        row_parts = min(-(-rows // ROWS), -(-many // (panel_parts * batch)))
    tasks = min(many, batch * row_parts * panel_parts)
    block = block_rows(depth, rows)
    each = 2 * (block + 8) + (-(-depth // 8) * 8 + block + 8 if features == 1 else 24 * depth)
    w_depth, w_column = (step // 4 for step in w.strides[-2:])
    if not packed and w_column != 1 and w_depth == 1 and features == 1:
        w_column = 1
    b.step(
        library.call(
            "or_gemm", tasks, x, weights, y, b.scratch((library.threads, each + each % 2), np.float32),
            each + each % 2, offsets, batch, rows, depth, features,
            x.strides[-2] // 4, features, packed, w_depth, w_column, row_parts, panel_parts, tasks, block,
            *epilogue_words(b, p, with_, result, features, 1),
        )
    )  # fmt: skip


def _offsets(x: np.ndarray, w: np.ndarray, y: np.ndarray, packed: bool, single: bool) -> np.ndarray:
    """[batch, 3]: floats from the beginning of x, w, y to the matrices of each batch."""
    batches = y.shape[:-2]
    offsets = np.zeros((*batches, 3), np.int64)
    matrix = packed_size(w.shape[-2], w.shape[-1], w.shape[-2] if single else 0)
    for at, operand in enumerate((x, w, y)):
        steps = [step // 4 for step in operand.strides[:-2]]
        if at == 1 and packed:
            steps = [matrix * math.prod(w.shape[k + 1 : -2]) for k in range(w.ndim - 2)]
        lead = len(batches) - len(steps)
        for axis, (step, count) in enumerate(zip(steps, operand.shape[:-2], strict=True)):
            if count > 1:
                along = np.arange(count) * step
                offsets[..., at] += along.reshape((count,) + (1,) * (len(batches) - 1 - lead - axis))
    return offsets.reshape(-1, 3)
