"""LSTM, GRU and RNN by the compiled library: one GEMM for the inputs of all steps, then one call for the whole loop.

float32, and the functions that most models have; `recurrent.py` does the rest in NumPy. Shapes as there: T steps, N
sequences, D directions, G gates, H state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.epilogue import Epilogue
from outrider.providers.cpu.kernels.frame import Bind
from outrider.providers.cpu.kernels.gates import Activation
from outrider.providers.cpu.kernels.panels import Operands, aligned
from outrider.providers.cpu.kernels.precision import cast, widened
from outrider.providers.cpu.kernels.products import multiply_compiled
from outrider.providers.cpu.native import Library

_FUNCTIONS = {"Sigmoid": 0, "Tanh": 1, "Relu": 2}  # as in C
_KINDS = {4: 0, 3: 1, 1: 2}  # by gates: LSTM, GRU, RNN
_PANEL = 32  # columns of a panel of R in C
_ROWS = 3  # sequences that C multiplies together


@dataclass(frozen=True)
class Loop:
    """What a node says of its loop. `functions` and `backwards`: one entry per direction."""

    gates: int
    functions: tuple[tuple[Activation, ...], ...]
    backwards: tuple[bool, ...]
    clip: float | None
    reset_after: bool


def takes(loop: Loop) -> bool:
    """True where C has the functions."""
    return all(f.name in _FUNCTIONS for functions in loop.functions for f in functions)


def record(
    b: Bind,
    library: Library,
    loop: Loop,
    x: np.ndarray,
    starts: Sequence[np.ndarray | None],
    lengths: np.ndarray | None,
    peephole: np.ndarray | None,
    y: np.ndarray | None,
    lasts: Sequence[np.ndarray | None],
) -> None:
    """Record the node: x [T, N, I] C-contiguous; W, R and B are its inputs 1 to 3, all in float32.

    `starts`: initial states [D, N, H]; `lengths` [N]; `peephole` [D, 3 H]; y [T, D, N, H] and `lasts` [D, N, H], of any
    strides but that of the last axis.
    """
    steps, batch, _ = x.shape
    weights = b.array(2)
    directions, hidden = weights.shape[0], weights.shape[2]
    width = loop.gates * hidden
    products = b.scratch((directions, steps * batch, width), np.float32)
    _multiply_inputs(b, x, products)
    main = loop.gates - (loop.gates == 3)
    first = _panels(b, 0, main * hidden)
    candidate = _panels(b, 2 * hidden, width) if loop.gates == 3 else None
    late = loop.gates == 3 and loop.reset_after
    bias = _biases(b, "sum of biases", (directions, width), _late_sum if late else _sum) if b.has(3) else None
    late_bias = _biases(b, "late bias", (directions, hidden), _late) if b.has(3) and late else None
    initial = [None if s is None else b.contiguous(cast(b, s, np.float32)) for s in (*starts, None)][:2]
    final = [*lasts, None][:2]
    flops = 2.0 * directions * steps * batch * width * hidden
    tasks = library.tasks(directions * -(-batch // _ROWS), flops / 40 + 1.5 * products.size)
    blocks = min(-(-tasks // directions), -(-batch // _ROWS))
    tasks = min(tasks, directions * blocks)
    padded = -(-hidden // _PANEL) * _PANEL
    each = -(-batch // blocks) * (3 * padded + 2 * -(-main * hidden // _PANEL) * _PANEL)
    place = next((last for last in final if last is not None), None)
    functions = [[_FUNCTIONS[f.name] for f in (*fs, *fs[-1:] * (3 - len(fs)))] for fs in loop.functions]
    numbers = [number for row in [*functions, *functions][:2] for number in row]
    b.step(
        library.call(
            "or_recurrent", tasks, products, first, candidate, bias, late_bias,
            None if peephole is None else b.contiguous(peephole), lengths, *initial, y, *final,
            *([0, 0, 0] if y is None else [step // 4 for step in y.strides[:3]]),
            *([0, 0] if place is None else [step // 4 for step in place.strides[:2]]),
            b.scratch((library.threads, each), np.float32), each, _KINDS[loop.gates], directions, steps, batch, hidden,
            sum(1 << d for d, backward in enumerate(loop.backwards) if backward), *numbers, loop.reset_after,
            float("inf") if loop.clip is None else loop.clip, blocks, tasks,
        )
    )  # fmt: skip


def _multiply_inputs(b: Bind, x: np.ndarray, products: np.ndarray) -> None:
    """products [D, T N, G H] = x [T N, I] times each W, transposed."""
    w = widened(b, 1).swapaxes(1, 2)
    rows = x.reshape(1, -1, x.shape[2])  # C-contiguous: a view
    library = b.compiled("gemm")
    if library is not None and min(x.size, w.size) > 0:
        multiply_compiled(b, library, rows, w, products, Epilogue(), Operands(), True)
    elif x.size:
        b.step(np.matmul, rows, w, products)
    else:
        b.step(products.fill, 0)


def _pack(place: np.ndarray, r: np.ndarray, first: int, last: int) -> None:
    """Step: rows first .. last of each R [D, G H, H] as panels of columns, padded with zeros."""
    directions, _, hidden = r.shape
    panels = place.reshape(directions, -1, hidden, _PANEL)
    panels[...] = 0
    for at in range(first, last, _PANEL):
        columns = r[:, at : min(at + _PANEL, last)]
        np.copyto(panels[:, (at - first) // _PANEL, :, : columns.shape[1]], columns.swapaxes(1, 2), "unsafe")


def _panels(b: Bind, first: int, last: int) -> np.ndarray:
    r = b.array(2)
    directions, _, hidden = r.shape
    size = directions * -(-(last - first) // _PANEL) * _PANEL * hidden
    if b.is_const(2):

        def make(contents: np.ndarray) -> np.ndarray:
            place = aligned(size)
            _pack(place, contents, first, last)
            return place

        packed: np.ndarray = b.packed(f"recurrent panels {first} {last}", 2, make)
        return packed
    place = b.scratch((size,), np.float32)
    b.step(_pack, place, r, first, last)
    return place


def _sum(biases: np.ndarray, place: np.ndarray) -> None:
    half = biases.shape[1] // 2
    np.add(biases[:, :half], biases[:, half:], place, casting="unsafe")


def _late_sum(biases: np.ndarray, place: np.ndarray) -> None:
    """Of the candidate only the input's bias: the other is added before the reset."""
    half = biases.shape[1] // 2
    _sum(biases, place)
    np.copyto(place[:, half // 3 * 2 :], biases[:, half // 3 * 2 : half], "unsafe")


def _late(biases: np.ndarray, place: np.ndarray) -> None:
    np.copyto(place, biases[:, -place.shape[1] :], "unsafe")


def _biases(b: Bind, key: str, shape: tuple[int, int], work: Callable[[np.ndarray, np.ndarray], None]) -> np.ndarray:
    if b.is_const(3):

        def make(contents: np.ndarray) -> np.ndarray:
            place = np.empty(shape, np.float32)
            work(contents, place)
            return place

        made: np.ndarray = b.packed(key, 3, make)
        return made
    place = b.scratch(shape, np.float32)
    b.step(work, b.array(3), place)
    return place
