"""DynamicQuantizeLSTM of com.microsoft: an LSTM whose weights are 8-bit integers.

What is multiplied with them, the input and the hidden state, becomes uint8 by its own range: the input once for all
steps, the state in every step. The products are exact, everything else is float32. Backwards, every sequence starts at
its own end; one step after its end its state counts as 0, as in onnxruntime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.cpu.kernels.gates import Activation, parse_activations, parse_direction
from outrider.providers.cpu.kernels.integer_products import product
from outrider.providers.cpu.kernels.integers import BYTES, Quantized, Result
from outrider.providers.cpu.kernels.integers_compiled import packed_weights, ready_rows
from outrider.providers.cpu.kernels.quantizing import dynamically_quantized, quantize_range
from outrider.providers.cpu.native import Library
from outrider.providers.wire.graph import Node

_DEFAULT = ["Sigmoid", "Tanh", "Tanh"]


@dataclass(frozen=True)
class Recurrence:
    """Attributes of DynamicQuantizeLSTM. `backwards`: one entry per direction."""

    backwards: tuple[bool, ...]
    functions: tuple[tuple[Activation, ...], ...]
    clip: float | None
    coupled: bool
    plain: bool  # the default functions


def _parse(node: Node) -> Recurrence:
    get = node.attributes.get
    backwards = parse_direction(node)
    functions = parse_activations(node, _DEFAULT, len(backwards))
    clip = float(get("clip", 0.0))
    names = [str(name).lower() for name in get("activations") or _DEFAULT * len(backwards)]
    plain = names == [name.lower() for name in _DEFAULT] * len(backwards)
    return Recurrence(backwards, functions, clip or None, bool(get("input_forget", 0)), plain)


@dataclass(frozen=True)
class Weights:
    """One direction of W or R [depth, 4 H]: values, and scale and zero point of the whole or of each column."""

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray

    def shifted(self) -> np.ndarray:
        """Values less zero points; float32 where its sums of products with uint8 are exact, else float64."""
        dtype = np.float32 if self.values.shape[0] * 255 * 255 <= 2**24 else np.float64
        whole: np.ndarray = self.values.astype(dtype) - self.zero.astype(dtype)
        return whole


def _product(x: np.ndarray, weights: np.ndarray, scale: np.ndarray, y: np.ndarray) -> None:
    """y = x @ weights * scale, x [rows, depth] being quantized by its range."""
    step, point = quantize_range(x)
    whole = np.clip(np.rint(x / step), -point, np.float32(255) - point).astype(weights.dtype)
    np.copyto(y, whole @ weights, "unsafe")
    np.multiply(y, step * scale, y)


@dataclass
class Layer:
    """One direction, bound. `x` [T, N, I]; `y` [T, N, H] or None; states [N, H] hold the final ones after a run."""

    x: np.ndarray
    w: Weights
    r: Weights
    ready: tuple[np.ndarray, np.ndarray] | None
    bias: np.ndarray | None
    peephole: np.ndarray | None
    lengths: np.ndarray | None
    initial: tuple[np.ndarray | None, np.ndarray | None]
    states: tuple[np.ndarray, np.ndarray]
    y: np.ndarray | None
    backward: bool
    functions: tuple[Activation, ...]
    p: Recurrence
    products: np.ndarray
    gates: np.ndarray

    def run(self) -> None:
        """All steps."""
        w, r = self.ready or (self.w.shifted(), self.r.shifted())
        steps, batch, width = self.products.shape
        flat = self.products.reshape(steps * batch, width)
        _product(self.x.reshape(steps * batch, -1), w, self.w.scale, flat)
        if self.bias is not None:
            np.add(flat, self.bias[:width] + self.bias[width:], flat)
        for state, initial in zip(self.states, self.initial, strict=True):
            np.copyto(state, 0 if initial is None else initial)
        lengths = np.full(batch, steps) if self.lengths is None else self.lengths.astype(np.int64)
        every = np.arange(batch)
        for k in range(steps):
            present = k < lengths
            t = np.where(present & self.backward, lengths - 1 - k, k)
            fed = np.where((k <= lengths)[:, None], self.states[0], np.float32(0))
            _product(fed, r, self.r.scale, self.gates)
            np.add(self.gates, self.products[t, every], self.gates)
            result = self.step(present[:, None])
            if self.y is not None:
                self.y[t, every] = result

    def step(self, present: np.ndarray) -> np.ndarray:
        """The gates input, output, forget, cell are there; make the new states of the sequences that go on.

        Returns what they give out, 0 for the others.
        """
        f, g, h = self.functions
        hidden, cell = self.states
        width = hidden.shape[1]
        into, out, forget, fresh = (np.ascontiguousarray(self.gates[:, k * width :][:, :width]) for k in range(4))
        term = np.empty_like(into)
        p = self.peephole
        if p is not None:
            into += cell * p[:width]
            forget += cell * p[2 * width :]
        self.limit(into, forget, fresh)
        f(into, term)
        if self.p.coupled:
            np.subtract(1, into, forget)
        else:
            f(forget, term)
        g(fresh, term)
        new = forget * cell + into * fresh
        if p is not None:
            out += new * p[width : 2 * width]
        self.limit(out)
        f(out, term)
        result = new.copy()
        h(result, term)
        result *= out
        np.copyto(cell, new, where=present)
        np.copyto(hidden, result, where=present)
        return np.where(present, result, np.float32(0))

    def limit(self, *gates: np.ndarray) -> None:
        """Clip what goes into an activation."""
        for x in gates if self.p.clip is not None else ():
            np.clip(x, -self.p.clip, self.p.clip, out=x)  # type: ignore[operator]


def _weights(b: Bind, i: int, scale: int, depth: int, width: int) -> list[Weights]:
    """Input i [directions, depth, width], with its scale and zero point [directions] or [directions, width]."""
    values = b.array(i)
    if values.ndim != 3 or values.shape[1:] != (depth, width):
        raise ValueError(f"weights {list(values.shape)} are not [directions, {depth}, {width}]")
    return [Weights(values[d], b.array(scale)[d, ...], b.array(scale + 1)[d, ...]) for d in range(values.shape[0])]


def _compiled(
    b: Bind,
    library: Library,
    p: Recurrence,
    x: np.ndarray,
    y: np.ndarray | None,
    finals: list[np.ndarray | None],
) -> None:
    """Record the compiled kernels: the inputs of all steps at once, then the steps of both directions."""
    steps, batch, size = x.shape
    width, directions = b.array(2).shape[1], len(p.backwards)
    flat = b.reshaped(x, (steps * batch, size))
    values, scale, zero = b.scratch(flat.shape, np.uint8), b.scratch((), np.float32), b.scratch((), np.uint8)
    dynamically_quantized(b, flat, values, scale, zero)
    words: list[Any] = []
    states = [b.scratch((directions, batch, width), np.float32) for _ in range(2)]
    for state, i in zip(states, (5, 6), strict=True):
        if b.has(i):
            b.copy(state, b.array(i))
        else:
            b.step(state.fill, 0)
    for d, backward in enumerate(p.backwards):
        products = b.scratch((steps * batch, 4 * width), np.float32)
        result = Result(np.dtype(np.float32), scale, b.contiguous(b.array(8)[d, ...]))
        product(b, Quantized(None, values, zero, None, None), _direction(b, 1, 9, d), result, products)
        r = _direction(b, 2, 11, d)
        weights = packed_weights(b, library, r, r.values, lambda w: w[None], False)
        r_scale = b.contiguous(b.array(10)[d, ...])
        row = ready_rows(b, weights, batch, width)
        place = None if y is None else y[:, d]
        words += [
            products, b.contiguous(b.array(3)[d]) if b.has(3) else None, *weights, r_scale, r_scale.size > 1,
            states[0][d], states[1][d], place, directions * batch * width, backward, row,
        ]  # fmt: skip
    if directions == 1:
        words += [None] * len(words)
    gates = b.scratch((directions, batch, -(-4 * width // 16) * 16), np.float32)
    b.step(library.call("or_integer_lstm", directions, *words, steps, batch, width, gates))
    for final, state in zip(finals, states, strict=True):
        if final is not None:
            b.copy(final, state)


def _direction(b: Bind, i: int, zero: int, d: int) -> Quantized:
    """Input i of one direction."""

    def pick(contents: np.ndarray) -> np.ndarray:
        part: np.ndarray = contents[d]
        return part

    points = b.contiguous(b.array(zero)[d, ...])
    return Quantized(i, b.array(i)[d], points, zero, -1, pick, f"direction {d}")


def _ready(b: Bind, i: int, direction: int, weights: Weights) -> np.ndarray:
    ready: np.ndarray = b.packed(f"shifted {direction}", i, lambda _: weights.shifted())
    return ready


@kernel(
    "DynamicQuantizeLSTM",
    domain="com.microsoft",
    dtypes={0: {"float32"}, 1: BYTES, 2: BYTES},
    parse=_parse,
    compiled="quantized",
)
def dynamic_quantize_lstm(b: Bind, p: Recurrence) -> None:
    """com.microsoft DynamicQuantizeLSTM-1: inputs and outputs of LSTM, then scale and zero point of W and of R.

    W [D, I, 4 H] and R [D, H, 4 H] lie transposed, compared with LSTM.
    """
    x = b.contiguous(b.array(0))
    hidden, directions = b.array(2).shape[1], len(p.backwards)
    if x.ndim != 3 or b.array(1).shape[0] != directions:
        raise ValueError(f"weights {list(b.array(1).shape)} do not fit {directions} directions of {list(x.shape)}")
    w = _weights(b, 1, 8, x.shape[2], 4 * hidden)
    r = _weights(b, 2, 10, hidden, 4 * hidden)
    steps, batch = x.shape[:2]
    y = b.out(0, (steps, directions, batch, hidden), np.float32) if b.wanted(0) else None
    finals = [b.out(i, (directions, batch, hidden), np.float32) if b.wanted(i) else None for i in (1, 2)]
    products = b.scratch((steps, batch, 4 * hidden), np.float32)
    gates = b.scratch((batch, 4 * hidden), np.float32)
    known = all(b.is_const(i) for i in (1, 2, 9, 11))
    library = b.compiled("quantized")
    plain = p.plain and p.clip is None and not p.coupled and not b.has(4) and not b.has(7)
    if library is not None and known and plain and x.size and hidden:
        _compiled(b, library, p, x, y, finals)
        return

    def part(i: int, d: int) -> np.ndarray | None:
        return b.array(i)[d] if b.has(i) else None

    for d, backward in enumerate(p.backwards):
        ready = (_ready(b, 1, d, w[d]), _ready(b, 2, d, r[d])) if known else None
        states = (b.scratch((batch, hidden), np.float32), b.scratch((batch, hidden), np.float32))
        layer = Layer(
            x,
            w[d],
            r[d],
            ready,
            part(3, d),
            part(7, d),
            b.array(4) if b.has(4) else None,
            (part(5, d), part(6, d)),
            states,
            None if y is None else y[:, d],
            backward,
            p.functions[d],
            p,
            products,
            gates,
        )
        b.step(layer.run)
        for place, state in zip(finals, states, strict=True):
            if place is not None:
                b.step(np.copyto, place[d], state)
