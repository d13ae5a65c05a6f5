"""Weights and numbers per feature as the compiled products read them: panels of columns, padded vectors.

`tiles.h` says what a panel is. Everything is float32, aligned to cache lines, and padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.epilogue import ACTIVATIONS, BIAS, RESIDUAL, SCALE, SHIFT, Epilogue
from outrider.providers.cpu.kernels.frame import Bind
from outrider.providers.cpu.kernels.precision import widened
from outrider.shm.segment import address_of

_LINE = 64
_BEHIND = 24  # floats that C may read behind the last column
ROWS = 24  # rows of a product that are shared between tasks together: a multiple of the rows of all tiles
FLOPS = 60.0  # per nanosecond, on one thread: for the choice how many tasks to make
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


def packed_weights(
    b: Bind, i: int, key: str, shape: tuple[int, int, int], single: int, as_matrices: Matrices
) -> np.ndarray:
    """Input i as panels; packed once where it is constant, else in every run.

    `as_matrices` makes [n, depth, columns], the `shape`, of it; `key` names how; `single` as in `pack`.
    """
    n, depth, columns = shape
    size = n * packed_size(depth, columns, single)
    if b.is_const(i):

        def make(contents: np.ndarray) -> np.ndarray:
            place = aligned(size)
            pack(place, contents, as_matrices, single)
            return place

        weights: np.ndarray = b.packed(f"panels {key} {single}", i, make)
        return weights
    place = b.scratch((size,), np.float32)
    b.step(pack, place, b.array(i), as_matrices, single)
    return place


def _padded(place: np.ndarray, x: np.ndarray, features: int, factor: float) -> None:
    """Step: factor * x, of `features` numbers or one, into place; the single one of one feature everywhere."""
    if features == 1:
        place[:] = x.reshape(()) * np.float32(factor)
        return
    np.multiply(x.reshape(-1), np.float32(factor), place[:features])
    place[features:] = 0


def padded_features(b: Bind, i: int, features: int, factor: float = 1.0) -> np.ndarray | None:
    """factor * input i, of `features` numbers or one, with room behind them; None where it is not given."""
    if not b.has(i):
        return None
    x = widened(b, i)
    if x.size not in (features, 1):
        raise ValueError(f"input {i} {list(x.shape)} does not fit {features} features")
    if b.is_const(i):

        def make(contents: np.ndarray) -> np.ndarray:
            made = aligned(features + _BEHIND)
            _padded(made, contents.astype(np.float32), features, factor)
            return made

        numbers: np.ndarray = b.packed(f"padded {features} {factor}", i, make)
        return numbers
    place = b.scratch((features + _BEHIND,), np.float32)
    b.step(_padded, place, x, features, factor)
    return place


@dataclass(frozen=True)
class Operands:
    """What an epilogue combines the product with: padded numbers per feature, and the residual, which broadcasts."""

    bias: np.ndarray | None = None
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    residual: np.ndarray | None = None


def operands(b: Bind, p: Epilogue, features: int) -> Operands:
    """Those that the node gives at the usual positions."""
    bias, scale, shift = (padded_features(b, i, features) for i in (BIAS, SCALE, SHIFT))
    return Operands(bias, scale, shift, widened(b, RESIDUAL) if p.residual and b.has(RESIDUAL) else None)


def epilogue_words(
    b: Bind, p: Epilogue, with_: Operands, y: np.ndarray, row: int, column: int, order: tuple[int, ...] | None = None
) -> tuple[Any, ...]:
    """The words of `struct epilogue` for an output y whose rows and columns lie `row` and `column` floats apart.

    `order`: the memory order of y, which the residual is brought to.
    """
    residual = None if with_.residual is None else b.contiguous(np.broadcast_to(with_.residual, y.shape), order)
    return (
        with_.bias, with_.scale, with_.shift, residual, row, column, p.residual == "after",
        list(ACTIVATIONS).index(p.activation), p.alpha, p.beta, p.factor,
    )  # fmt: skip


def block_rows(depth: int, rows: int) -> int:
    """How many rows of `depth` floats are multiplied with all panels before the next ones."""
    most = max(1, min(10, _BLOCK // depth // ROWS)) * ROWS
    return min(most, -(-rows // ROWS) * ROWS)
