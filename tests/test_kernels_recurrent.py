"""LSTM, GRU and RNN against onnxruntime; the layout that it lacks against the one that it has."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from kernel_harness import check, ort_results, plain_node, run_node
from native_library import libraries
from onnx import helper

pytestmark = pytest.mark.fast
RNG = np.random.default_rng(11)
T, N, WIDTH, H = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def inputs(op: str, directions: int, *, bias: bool = False, lengths: bool = False, initial: bool = False) -> list[Any]:
    width = GATES[op] * H
    given: list[Any] = [floats(T, N, WIDTH), floats(directions, width, WIDTH), floats(directions, width, H)]
    given.append(floats(directions, 2 * width) if bias else None)
    given.append(np.array([5, 1, 3], np.int32) if lengths else None)
    given += [floats(directions, N, H) if initial else None for _ in range(STATES[op])]
    return given


def agree(op: str, given: list[Any], **attributes: Any) -> None:
    outputs = 1 + STATES[op]
    check(op, given, outputs=outputs, hidden_size=H, rtol=1e-4, atol=1e-5, **attributes)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("full", [False, True])
def test_directions(op: str, direction: str, full: bool) -> None:
    given = inputs(op, 2 if direction == "bidirectional" else 1, bias=full, lengths=full, initial=full)
    agree(op, given, direction=direction)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_lstm_with_peepholes_coupled_gates_and_clip(direction: str) -> None:
    d = 2 if direction == "bidirectional" else 1
    given = [*inputs("LSTM", d, bias=True, initial=True), floats(d, 3 * H)]
    agree("LSTM", given, direction=direction)
    agree("LSTM", given, direction=direction, clip=0.7)
    agree("LSTM", inputs("LSTM", d, bias=True), direction=direction, clip=0.3)
    agree("LSTM", inputs("LSTM", d, bias=True), direction=direction, input_forget=1)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_gru_with_reset_after(direction: str) -> None:
    d = 2 if direction == "bidirectional" else 1
    for bias in (False, True):
        agree("GRU", inputs("GRU", d, bias=bias, lengths=True), direction=direction, linear_before_reset=1)
        agree("GRU", inputs("GRU", d, bias=bias), direction=direction, clip=0.5)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 8), (4, 33), (7, 40)])
def test_sizes(op: str, batch: int, hidden: int) -> None:
    """States that fill no panel, one panel and more; sequences in groups of all sizes."""
    width = GATES[op] * hidden
    given = [floats(4, batch, 5), floats(2, width, 5) * 0.5, floats(2, width, hidden) * 0.3, floats(2, 2 * width), None]
    given += [floats(2, batch, hidden) for _ in range(STATES[op])]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": "bidirectional"}
    for after in (0, 1) if op == "GRU" else (0,):
        if op == "GRU":
            attributes["linear_before_reset"] = after
        check(op, given, outputs=1 + STATES[op], rtol=1e-4, atol=1e-5, **attributes)


ACTIVATIONS = [
    ("Relu", None, None),
    ("Affine", 0.5, 0.1),
    ("LeakyRelu", 0.05, None),
    ("ThresholdedRelu", 0.4, None),
    ("ScaledTanh", 0.8, 0.6),
    ("HardSigmoid", 0.3, 0.4),
    ("Elu", 0.7, None),
    ("Softsign", None, None),
    ("Softplus", None, None),
]


@pytest.mark.parametrize(("name", "alpha", "beta"), ACTIVATIONS, ids=[a[0] for a in ACTIVATIONS])
def test_activations(name: str, alpha: float | None, beta: float | None) -> None:
    numbers = {}
    if alpha is not None:
        numbers["activation_alpha"] = [alpha, alpha]
    if beta is not None:
        numbers["activation_beta"] = [beta, beta]
    given = inputs("RNN", 2, bias=True)
    given[2] *= 0.1  # unbounded functions must not run away
    agree("RNN", given, direction="bidirectional", activations=[name, name], **numbers)


@pytest.mark.parametrize("op", GATES)
def test_batch_first(op: str) -> None:
    given = inputs(op, 2, bias=True, initial=True)
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(given)]
    outputs = [f"y{i}" for i in range(1 + STATES[op])]
    proto = helper.make_node(op, names, outputs, hidden_size=H, direction="bidirectional")
    y, *finals = ort_results(proto, given, 21)
    expected = [y.transpose(2, 0, 1, 3), *(f.swapaxes(0, 1) for f in finals)]
    given[0] = given[0].swapaxes(0, 1)
    given[5:] = [s.swapaxes(0, 1) for s in given[5:]]
    attributes = {"direction": "bidirectional", "layout": 1, "hidden_size": H}
    check(op, given, outputs=len(outputs), oracle=expected, rtol=1e-4, atol=1e-5, **attributes)


def test_only_the_last_state() -> None:
    given = inputs("LSTM", 1, bias=True)
    check("LSTM", given, outputs=["", "h"], hidden_size=H, rtol=1e-4, atol=1e-5)


def test_halves_round_once() -> None:
    given = [None if x is None else x.astype(np.float16) for x in inputs("LSTM", 1, bias=True)]
    wide = [None if x is None else x.astype(np.float32) for x in given]
    proto = helper.make_node(
        "LSTM", [f"x{i}" if x is not None else "" for i, x in enumerate(wide)], ["y"], hidden_size=H
    )
    expected = ort_results(proto, wide, 21)[0].astype(np.float16)
    check("LSTM", given, oracle=[expected], hidden_size=H, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(("i", "shape", "right"), [(4, (1,), [N]), (7, (1, H), [1, 3 * H])])
def test_lengths_and_peepholes_that_are_too_few(i: int, shape: tuple[int, ...], right: list[int]) -> None:
    given = [*inputs("LSTM", 1, bias=True, lengths=True, initial=True), floats(1, 3 * H)]
    given[i] = np.ones(shape, given[i].dtype)
    proto = helper.make_node("LSTM", [f"x{k}" for k in range(8)], ["y"], hidden_size=H)
    for library in (None, *(libraries() or ())):
        with pytest.raises(ValueError, match=re.escape(f"input {i} has the shape {list(shape)}, it must be {right}")):
            run_node(plain_node(proto, 22, given, ["float32"]), given, None, library)
