"""Weights and numbers per feature as the compiled products read them: panels of columns, padded vectors.

`tiles.h` says what a panel is. Everything is float32, aligned to cache lines, and padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.epilogue import ACTIVATIONS, BIAS, RESIDUAL, SCALE, SHIFT, Epilogue, per_feature
from outrider.providers.cpu.kernels.frame import Bind
from outrider.providers.cpu.kernels.precision import widened
from outrider.shm.segment import address_of

_LINE = 64
_BEHIND = 24  # floats that C may read behind the last column
ROWS = 24  # rows of a product that are shared between tasks together: a multiple of the rows of all tiles
_BLOCK = 40_000  # floats of a block of rows: 160 KB stay in the L2 cache while all panels pass


def aligned(n: int) -> np.ndarray:
    """float32 [n], beginning at a cache line."""
    memory = np.empty(n + _LINE // 4, np.float32)
    start = -address_of(memory) % _LINE // 4
    return memory[start : start + n]


def panel_width(left: int) -> int:
    """The width of the next panel when `left` columns are left, as in tiles.h."""
    vectors = -(-left // 8)
    return 8 if vectors == 1 else 16 if vectors in (2, 4) else 24


def panel_count(columns: int) -> int:
    """How many panels there are."""
    count = 0
    while columns > 0:
        columns -= panel_width(columns)
        count += 1
    return count


def packed_size(depth: int, columns: int, single: int) -> int:
    """Floats of one packed matrix; `single` as in `pack`."""
    return depth // single * (-(-single // 8) * 8) if single else depth * -(-columns // 8) * 8


Matrices = Callable[[np.ndarray], np.ndarray]


def pack(place: np.ndarray, w: np.ndarray, as_matrices: Matrices, single: int) -> None:
    """Step: as_matrices(w), [n, depth, columns], into place, panel after panel.

    `single` > 0: matrices of a single column for `multiply_column`, which is padded to a multiple of 8 after each
    `single` numbers, the chunks of the rows it is for.
    """
    matrices = as_matrices(w)
    n, depth, columns = matrices.shape
    if single:
        chunks = place.reshape(n, -1, -(-single // 8) * 8)
        chunks[:, :, single:] = 0
        np.copyto(chunks[:, :, :single], matrices.reshape(n, -1, single), "unsafe")
        return
    for one, matrix in zip(place.reshape(n, -1), matrices, strict=True):
        column = 0
        while column < columns:
            width = panel_width(columns - column)
            panel = one[column * depth : (column + width) * depth].reshape(depth, width)
            real = min(width, columns - column)
            panel[:, real:] = 0
            np.copyto(panel[:, :real], matrix[:, column : column + real], "unsafe")
            column += width


def packed_weights(b: Bind, i: int, key: str, w: np.ndarray, single: int, as_matrices: Matrices) -> np.ndarray:
    """Input i, whose values in float32 are `w`, as panels; packed once where it is constant, else in every run.

    `as_matrices` makes [n, depth, columns] of it; `key` names how; `single` as in `pack`.
    """
    n, depth, columns = as_matrices(w).shape
    size = n * packed_size(depth, columns, single)
    if b.is_const(i):

        def make(contents: np.ndarray) -> np.ndarray:
            place = aligned(size)
            pack(place, contents, as_matrices, single)
            return place

        weights: np.ndarray = b.packed(f"panels {key} {single}", i, make)
        return weights
    place = b.scratch((size,), np.float32)
    b.step(pack, place, w, as_matrices, single)
    return place


def _padded(place: np.ndarray, x: np.ndarray, features: int) -> None:
    """Step: x [features] or [1] into place; the single one of one feature everywhere."""
    if features == 1:
        np.copyto(place, x, "unsafe")
        return
    np.copyto(place[:features], x, "unsafe")
    place[features:] = 0


def padded_features(b: Bind, i: int, features: int, factor: float = 1.0) -> np.ndarray | None:
    """Input i of shape [features] or [1], times `factor`, with room behind it; None where it is not given."""
    if not b.has(i):
        return None
    x = per_feature(b, i, features)
    size = features + _BEHIND
    if b.is_const(i):

        def make(contents: np.ndarray) -> np.ndarray:
            place = aligned(size)
            _padded(place, contents.reshape(-1) * np.float32(factor), features)
            return place

        numbers: np.ndarray = b.packed(f"padded {features} {factor}", i, make)
        return numbers
    place = b.scratch((size,), np.float32)
    b.step(_padded, place, x.reshape(-1), features)
    if factor != 1:
        b.step(np.multiply, place, np.float32(factor), place)
    return place


def epilogue_words(
    b: Bind, p: Epilogue, y: np.ndarray, features: int, row: int, column: int, order: tuple[int, ...] | None
) -> tuple[Any, ...]:
    """The words of `struct epilogue` for an output y whose rows and columns lie `row` and `column` floats apart.

    `order`: the memory order of y, which the residual is brought to.
    """
    residual = None
    if p.residual and b.has(RESIDUAL):
        residual = b.contiguous(np.broadcast_to(widened(b, RESIDUAL), y.shape), order)
    numbers = [padded_features(b, i, features) for i in (BIAS, SCALE, SHIFT)]
    return (
        *numbers, residual, row, column, p.residual == "after",
        list(ACTIVATIONS).index(p.activation), p.alpha, p.beta, p.factor,
    )  # fmt: skip


def block_rows(depth: int, rows: int) -> int:
    """How many rows of `depth` floats are multiplied with all panels before the next ones."""
    most = max(1, min(10, _BLOCK // depth // ROWS)) * ROWS
    return min(most, -(-rows // ROWS) * ROWS)
