"""`outrider::Chain`: every instruction and random programs against float64, in NumPy and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import compare, plain_node
from onnx import helper

from outrider.providers.cpu.kernels.blockwise import INSTRUCTIONS
from outrider.providers.cpu.kernels.frame import Unsupported, channels_last, find
from outrider.providers.wire.graph import Node

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0)


# Each instruction in float64, by its definition in ONNX.
EXACT: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Min": np.minimum,
    "Max": np.maximum, "Neg": np.negative, "Abs": np.abs, "Sqrt": np.sqrt, "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Exp": np.exp, "Log": np.log, "Tanh": np.tanh, "Erf": _erf, "Sigmoid": _sigmoid,
    "Relu": lambda x: np.maximum(x, 0), "LeakyRelu": lambda x, a: np.where(x < 0, a * x, x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1), "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Reciprocal": lambda x: 1 / x, "Floor": np.floor, "Ceil": np.ceil, "Round": np.rint,
    "Clip": lambda x, low, high: np.minimum(np.maximum(x, low), high), "Softplus": _softplus,
    "Silu": lambda x: x * _sigmoid(x), "Gelu": lambda x: x / 2 * (1 + _erf(x / math.sqrt(2))),
    "GeluTanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "Elu": lambda x, a: np.where(x < 0, a * np.expm1(x), x), "Softsign": lambda x: x / (1 + np.abs(x)),
    "Mish": lambda x: x * np.tanh(_softplus(x)), "ThresholdedRelu": lambda x, a: np.where(x > a, x, 0),
    "Sign": np.sign, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "Equal": np.equal, "Where": lambda c, x, y: np.where(c != 0, x, y),
    "Swish": lambda x, a: x * _sigmoid(a * x), "Selu": lambda x, a, g: g * np.where(x < 0, a * np.expm1(x), x),
    "Celu": lambda x, a: np.maximum(x, 0) + np.minimum(0, a * np.expm1(x / a)), "Copy": lambda x: x,
    "NotEqual": np.not_equal,
    "MulAdd": lambda a, b, c: a * b + c,
}  # fmt: skip


def chain_node(program: Sequence[Sequence[Any]], inputs: Sequence[np.ndarray]) -> Node:
    proto = helper.make_node("Chain", [f"x{i}" for i in range(len(inputs))], ["y"], domain="outrider")
    return replace(plain_node(proto, 1, inputs, ["float32"]), attributes={"program": [list(line) for line in program]})


def evaluated(program: Sequence[Sequence[Any]], inputs: Sequence[np.ndarray]) -> np.ndarray:
    values = [x.astype(np.float64) for x in inputs]
    for name, *operands in program:
        values.append(np.asarray(EXACT[name](*(values[k] for k in operands)), np.float64))
    return values[-1]


def test_every_instruction_has_a_definition() -> None:
    assert EXACT.keys() == INSTRUCTIONS.keys()


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_each_instruction(name: str) -> None:
    """Within 2e-6 relative to what goes in and comes out."""
    for shape in ((3,), (2, 3, 700), (2, 8, 5, 7)):
        rng = np.random.default_rng(len(name) + len(shape))
        count = INSTRUCTIONS[name][0]
        inputs = [rng.normal(0, 3, shape).astype(np.float32)]
        inputs += [rng.uniform(0.5, 2, shape[-k:] if k else ()).astype(np.float32) for k in range(count - 1)]
        if name in ("Sqrt", "Rsqrt", "Log", "Pow"):
            inputs[0] = np.abs(inputs[0])
        if name == "Clip":
            inputs[1] -= 2
        program = [[name, *range(count)]]
        expected = evaluated(program, inputs).astype(np.float32)
        compare(chain_node(program, inputs), inputs, [expected], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS.keys() - {"Pow", "Celu", "Selu", "Clip", "HardSigmoid"}))
def test_special_values(name: str) -> None:
    """NaN, infinities, zeros and the smallest and largest numbers give what float64 gives."""
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, huge, -huge, 1e-45, 88.0, -88.0, 1.0], np.float32)
    inputs = [x, np.array([0.5], np.float32), np.array([2.0], np.float32)][: INSTRUCTIONS[name][0]]
    program = [[name, *range(len(inputs))]]
    expected = evaluated(program, inputs).astype(np.float32)
    limits = {"Gelu", "GeluTanh", "Silu", "Swish", "Mish", "HardSwish", "Softsign"}  # inf * 0 and inf / inf
    if name in limits:
        keep = np.abs(x) < 1e9
        inputs, expected = [x[keep], *inputs[1:]], expected[keep]
    compare(chain_node(program, inputs), inputs, [expected], rtol=2e-6, atol=1e-38)


def test_nan_stays() -> None:
    x, one = np.array([np.nan, 1.0], np.float32), np.array([1.0, np.nan], np.float32)
    for name in ("Min", "Max", "Add", "Mul", "Pow"):
        program = [[name, 0, 1]]
        expected = evaluated(program, [x, one]).astype(np.float32)
        compare(chain_node(program, [x, one]), [x, one], [expected])
    low, high = np.array(-1.0, np.float32), np.array(0.5, np.float32)
    compare(chain_node([["Clip", 0, 1, 2]], [x, low, high]), [x, low, high], [np.array([np.nan, 0.5], np.float32)])


SAFE = ("Add", "Sub", "Mul", "Min", "Max", "Neg", "Abs", "Tanh", "Sigmoid", "Relu", "HardSwish", "Gelu", "Silu")


@st.composite
def cases(draw: Any) -> tuple[list[list[Any]], list[np.ndarray]]:
    """A program whose errors stay small, and inputs that broadcast, some with channels last in memory."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rank = draw(st.integers(0, 5))
    shape = tuple(draw(st.sampled_from((1, 2, 3, 8, 17, 33))) for _ in range(rank))
    inputs = []
    for _ in range(draw(st.integers(1, 5))):
        form = tuple(n if draw(st.booleans()) else 1 for n in shape)[draw(st.integers(0, rank)) :]
        form = shape if draw(st.booleans()) else form
        x = rng.uniform(-2, 2, form).astype(np.float32)
        if len(form) > 2 and draw(st.booleans()):
            order = channels_last(len(form))
            back = np.argsort(order)
            x = np.ascontiguousarray(x.transpose(order)).transpose(back)
        inputs.append(x)
    program: list[list[Any]] = []
    unread = list(range(len(inputs)))
    while not program or len(unread) > 1:
        two = len(unread) > 1 and draw(st.booleans())
        name = draw(st.sampled_from([n for n in SAFE if INSTRUCTIONS[n][0] == (2 if two else 1)]))
        operands = [unread.pop(0) for _ in range(2 if two else 1)]
        unread.append(len(inputs) + len(program))
        program.append([name, *operands])
        if len(program) > 12:
            while len(unread) > 1:
                program.append(["Max", unread.pop(0), unread.pop(0)])
                unread.append(len(inputs) + len(program) - 1)
    return program, inputs


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases())
def test_random_programs(case: tuple[list[list[Any]], list[np.ndarray]]) -> None:
    program, inputs = case
    expected = evaluated(program, inputs).astype(np.float32)
    compare(chain_node(program, inputs), inputs, [expected], rtol=1e-4, atol=1e-5)


def test_an_operand_is_read_twice() -> None:
    x = np.random.default_rng(0).uniform(-2, 2, (5, 300)).astype(np.float32)
    program = [["Tanh", 0], ["Mul", 1, 0], ["Add", 2, 1], ["Sub", 3, 2]]
    compare(chain_node(program, [x]), [x], [evaluated(program, [x]).astype(np.float32)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "program", [[], [["Nothing", 0]], [["Add", 0]], [["Neg", 1]], [["Neg", 0], ["Neg", 3]]], ids=str
)
def test_what_is_no_program_is_refused(program: list[list[Any]]) -> None:
    node = chain_node(program, [np.zeros(3, np.float32)])
    with pytest.raises(Unsupported):
        find(node).parsed(node)
