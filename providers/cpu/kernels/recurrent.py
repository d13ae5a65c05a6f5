"""LSTM, GRU and RNN: one GEMM multiplies the inputs of all steps, then one small GEMM per step.

Shapes with layout 0: X [T, N, I], W [D, G*H, I], R [D, G*H, H], B [D, 2*G*H], sequence_lens [N], initial states
[D, N, H], P [D, 3*H]; Y [T, D, N, H], final states [D, N, H]. Layout 1 puts N first. G: gates; D: directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, kernel
from outrider.providers.cpu.kernels.gates import Activation, parse_activations, parse_direction
from outrider.providers.cpu.kernels.precision import finish, wide, widened
from outrider.providers.cpu.kernels.recurrent_compiled import Loop, record, takes
from outrider.providers.cpu.native import Library
from outrider.providers.wire.dtypes import FLOATS
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Recurrence:
    """Attributes of LSTM, GRU and RNN; each reads its own. `backwards`: one entry per direction."""

    backwards: tuple[bool, ...]
    functions: tuple[tuple[Activation, ...], ...]
    clip: float | None
    batch_first: bool
    coupled: bool
    reset_after: bool
    hidden: int | None


def _parser(*default: str) -> Callable[[Node], Recurrence]:
    def parse(node: Node) -> Recurrence:
        get = node.attributes.get
        backwards = parse_direction(node)
        clip, hidden = get("clip"), get("hidden_size")
        return Recurrence(
            backwards,
            parse_activations(node, default, len(backwards)),
            None if clip is None else float(clip),
            bool(get("layout", 0)),
            bool(get("input_forget", 0)),
            bool(get("linear_before_reset", 0)),
            None if hidden is None else int(hidden),
        )

    return parse


@dataclass
class Layer:
    """One direction of one node, bound: arrays at fixed addresses in the dtype to compute in.

    `x` [T, N, I]; `states` [N, H] start as the initial states and end as the final ones; `y` [T, N, H] or None.
    `products` [T, N, G*H], `gates` [N, G*H] and `term` [N, G*H] are scratch; `lengths` [N] or None.
    """

    x: np.ndarray
    w: np.ndarray
    r: np.ndarray
    bias: np.ndarray | None
    peephole: np.ndarray | None
    lengths: np.ndarray | None
    states: list[np.ndarray]
    initial: list[np.ndarray | None]
    y: np.ndarray | None
    backward: bool
    functions: tuple[Activation, ...]
    clip: float | None
    products: np.ndarray
    gates: np.ndarray
    term: np.ndarray
    spare: list[np.ndarray]

    def start(self, split_bias: int = 0) -> None:
        """Multiply all inputs and add the biases; of the last `split_bias` columns only the input's bias."""
        steps, batch, width = self.products.shape
        flat = self.products.reshape(steps * batch, width)
        np.matmul(self.x.reshape(steps * batch, self.x.shape[2]), self.w.T, flat)
        if self.bias is not None:
            both = self.bias[:width] + self.bias[width:]
            if split_bias:
                both[-split_bias:] = self.bias[width - split_bias : width]
            np.add(flat, both, flat)
        for state, initial in zip(self.states, self.initial, strict=True):
            if initial is None:
                state.fill(0)
            else:
                np.copyto(state, initial, "unsafe")

    def limit(self, x: np.ndarray) -> None:
        """Clip what goes into an activation."""
        if self.clip is not None:
            np.clip(x, -self.clip, self.clip, out=x)

    def times(self) -> range:
        """The steps in the order of this direction. Past its end a sequence holds its state, whichever way we go."""
        steps = len(self.products)
        return range(steps - 1, -1, -1) if self.backward else range(steps)

    def keep(self, t: int, new: list[np.ndarray]) -> None:
        """Take over the new states of the sequences that have a step t, and write the output."""
        if self.lengths is None:
            for state, value in zip(self.states, new, strict=True):
                if state is not value:
                    np.copyto(state, value)
            if self.y is not None:
                np.copyto(self.y[t], self.states[0], "unsafe")
            return
        present = (t < self.lengths)[:, None]
        for state, value in zip(self.states, new, strict=True):
            np.copyto(state, value, where=present)
        if self.y is not None:
            np.copyto(self.y[t], 0)
            np.copyto(self.y[t], self.states[0], "unsafe", present)


def _lstm(layer: Layer, coupled: bool) -> None:
    """Gates in the order input, output, forget, cell."""
    f, g, h = layer.functions
    layer.start()
    hidden, cell = layer.states
    width = hidden.shape[1]
    gates, term = layer.gates, layer.term
    parts = [gates[:, k * width : (k + 1) * width] for k in range(4)]
    terms = [term[:, k * width : (k + 1) * width] for k in range(4)]
    into, out, forget, fresh = parts
    p = layer.peephole
    # Without lengths to respect the states change in place: the old ones are no longer needed when the new are written.
    new_hidden, new_cell = layer.spare if layer.lengths is not None else layer.states
    joint = p is None and not coupled  # then the three gates are adjacent and alike
    weights, sigmoids, sigmoid_terms = layer.r.T, gates[:, : 3 * width], term[:, : 3 * width]
    for t in layer.times():
        np.matmul(hidden, weights, gates)
        np.add(gates, layer.products[t], gates)
        if p is not None:
            np.add(into, cell * p[:width], into)
            np.add(forget, cell * p[2 * width :], forget)
        if joint:
            layer.limit(gates)
            f(sigmoids, sigmoid_terms)
        else:
            layer.limit(into)
            f(into, terms[0])
            if coupled:
                np.subtract(1, into, forget)
            else:
                layer.limit(forget)
                f(forget, terms[2])
            layer.limit(fresh)
        g(fresh, terms[3])
        np.multiply(forget, cell, new_cell)
        np.multiply(into, fresh, into)
        np.add(new_cell, into, new_cell)
        if not joint:
            if p is not None:
                np.add(out, new_cell * p[width : 2 * width], out)
            layer.limit(out)
            f(out, terms[1])
        np.copyto(new_hidden, new_cell)
        h(new_hidden, terms[0])
        np.multiply(new_hidden, out, new_hidden)
        layer.keep(t, [new_hidden, new_cell])


def _gru(layer: Layer, reset_after: bool) -> None:
    """Gates in the order update, reset, hidden."""
    f, g = layer.functions
    (hidden,) = layer.states
    width = hidden.shape[1]
    layer.start(width if reset_after else 0)
    gates, term = layer.gates, layer.term
    both, update, reset, fresh = (
        gates[:, : 2 * width],
        gates[:, :width],
        gates[:, width : 2 * width],
        gates[:, 2 * width :],
    )
    (new,) = layer.spare
    late = None if layer.bias is None else layer.bias[5 * width :]
    for t in layer.times():
        product = layer.products[t]
        if reset_after:
            np.matmul(hidden, layer.r.T, gates)
            if late is not None:
                np.add(fresh, late, fresh)
        else:
            np.matmul(hidden, layer.r[: 2 * width].T, both)
        np.add(both, product[:, : 2 * width], both)
        layer.limit(both)
        f(both, term[:, : 2 * width])
        if reset_after:
            np.multiply(fresh, reset, fresh)
        else:
            np.multiply(hidden, reset, new)
            np.matmul(new, layer.r[2 * width :].T, fresh)
        np.add(fresh, product[:, 2 * width :], fresh)
        layer.limit(fresh)
        g(fresh, term[:, 2 * width :])
        np.subtract(hidden, fresh, new)  # (1 - z) * fresh + z * hidden
        np.multiply(new, update, new)
        np.add(new, fresh, new)
        layer.keep(t, [new])


def _rnn(layer: Layer, unused: bool) -> None:
    (f,) = layer.functions
    (hidden,) = layer.states
    layer.start()
    for t in layer.times():
        np.matmul(hidden, layer.r.T, layer.gates)
        np.add(layer.gates, layer.products[t], layer.gates)
        layer.limit(layer.gates)
        f(layer.gates, layer.term)
        layer.keep(t, [layer.gates])


def _bind(b: Bind, p: Recurrence, gates: int, states: int, work: Callable[[Layer, bool], None], option: bool) -> None:
    """Record the steps of one node. Outputs: Y, then one final value of each state."""
    given = b.array(0)
    dtype = wide(given.dtype)
    w, r = widened(b, 1), widened(b, 2)
    directions, hidden = len(p.backwards), r.shape[-1]
    if w.ndim != 3 or r.shape != (directions, gates * hidden, hidden) or w.shape[:2] != r.shape[:2]:
        raise ValueError(
            f"weights {list(w.shape)} and {list(r.shape)} do not fit {directions} directions of {gates} gates"
        )
    if given.ndim != 3 or given.shape[2] != w.shape[2]:
        raise ValueError(f"weights {list(w.shape)} do not fit an input {list(given.shape)}")
    if p.hidden is not None and p.hidden != hidden:
        raise ValueError(f"hidden_size is {p.hidden}, the weights have {hidden}")
    swapped = given.swapaxes(0, 1) if p.batch_first else given
    steps, batch = swapped.shape[:2]
    x = swapped
    if x.dtype != dtype or not x.flags.c_contiguous:
        x = b.scratch(swapped.shape, dtype)
        b.step(np.copyto, x, swapped, "unsafe")

    def optional(i: int, convert: bool = True) -> np.ndarray | None:
        if not b.has(i):
            return None
        return widened(b, i) if convert else b.array(i)

    bias, lengths = optional(3), optional(4, convert=False)
    starts = [optional(i, convert=False) for i in range(5, 5 + states)]
    peephole = optional(7) if states == 2 else None
    for i, asked in ((4, [batch]), (7, [directions, 3 * hidden])):
        if b.has(i) and (i == 4 or states == 2) and list(b.array(i).shape) != asked:
            raise ValueError(f"input {i} has the shape {list(b.array(i).shape)}, it must be {asked}")
    y = finals = None
    if b.wanted(0):
        shape = (batch, steps, directions, hidden) if p.batch_first else (steps, directions, batch, hidden)
        y = b.out(0, shape, given.dtype)
        y = y.transpose(1, 2, 0, 3) if p.batch_first else y
    places: list[np.ndarray | None] = []
    for k in range(states):
        if b.wanted(1 + k):
            last = (batch, directions, hidden) if p.batch_first else (directions, batch, hidden)
            finals = b.out(1 + k, last, given.dtype)
            places.append(finals.swapaxes(0, 1) if p.batch_first else finals)
        else:
            places.append(None)
    if p.batch_first:
        starts = [None if s is None else s.swapaxes(0, 1) for s in starts]
    loop = Loop(gates, p.functions, p.backwards, p.clip, p.reset_after)
    library = b.compiled("recurrent")
    if library is not None and dtype == np.float32 and takes(loop) and not (option and states == 2):
        _compiled(b, library, loop, x, starts, lengths, peephole, y, places)
        return
    products = b.scratch((steps, batch, gates * hidden), dtype)
    gate, term = b.scratch((batch, gates * hidden), dtype), b.scratch((batch, gates * hidden), dtype)
    spare = [b.scratch((batch, hidden), dtype) for _ in range(states)]
    current = [b.scratch((batch, hidden), dtype) for _ in range(states)]
    for d, backward in enumerate(p.backwards):
        layer = Layer(
            x,
            w[d],
            r[d],
            None if bias is None else bias[d],
            None if peephole is None else peephole[d],
            lengths,
            current,
            [None if s is None else s[d] for s in starts],
            None if y is None else y[:, d],
            backward,
            p.functions[d],
            p.clip,
            products,
            gate,
            term,
            spare,
        )
        b.step(work, layer, option)
        for place, state in zip(places, current, strict=True):
            if place is not None:
                b.step(np.copyto, place[d], state, "unsafe")


def _compiled(
    b: Bind,
    library: Library,
    loop: Loop,
    x: np.ndarray,
    starts: Sequence[np.ndarray | None],
    lengths: np.ndarray | None,
    peephole: np.ndarray | None,
    y: np.ndarray | None,
    places: Sequence[np.ndarray | None],
) -> None:
    """Record the node by the compiled library; outputs of 16 bits are rounded from float32 at the end."""

    def wide_place(place: np.ndarray | None) -> np.ndarray | None:
        return place if place is None or place.dtype == np.float32 else b.scratch(place.shape, np.float32)

    whole, lasts = wide_place(y), [wide_place(place) for place in places]
    record(b, library, loop, x, starts, None if lengths is None else b.contiguous(lengths), peephole, whole, lasts)
    for place, computed in zip((y, *places), (whole, *lasts), strict=True):
        if place is not None and computed is not None:
            finish(b, place, computed)


_TYPES: dict[int, Any] = {0: FLOATS}


@kernel("LSTM", since=7, dtypes=_TYPES, compiled=("recurrent", "gemm"), parse=_parser("Sigmoid", "Tanh", "Tanh"))
def lstm(b: Bind, p: Recurrence) -> None:
    """ONNX LSTM-22, with peepholes, coupled gates, clipping and sequence lengths."""
    _bind(b, p, 4, 2, _lstm, p.coupled)


@kernel("GRU", since=7, dtypes=_TYPES, compiled=("recurrent", "gemm"), parse=_parser("Sigmoid", "Tanh"))
def gru(b: Bind, p: Recurrence) -> None:
    """ONNX GRU-22, reset before or after the linear transformation."""
    _bind(b, p, 3, 1, _gru, p.reset_after)


@kernel("RNN", since=7, dtypes=_TYPES, compiled=("recurrent", "gemm"), parse=_parser("Tanh"))
def rnn(b: Bind, p: Recurrence) -> None:
    """ONNX RNN-22."""
    _bind(b, p, 1, 1, _rnn, False)
