"""Activation functions of one tensor (and PRelu's slope).

Each is a recipe: steps that read x and write y, which may be the same memory. Recipes run in float32 for 16-bit floats,
whose result is rounded once, and in the input's own dtype otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.blockwise import blockwise, into, scalar_operand, takes
from outrider.providers.cpu.kernels.elementwise import erf_steps
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import clamp, convert, is_half, maximum, widened
from outrider.providers.wire.dtypes import FLOATS, NUMBERS
from outrider.providers.wire.graph import Node

Recipe = Callable[[Bind, np.ndarray, np.ndarray, Any], None]


def _activation(
    op_type: str, parse: Callable[[Node], Any] | None = None, *, since: int = 1
) -> Callable[[Recipe], Recipe]:
    def register(recipe: Recipe) -> Recipe:
        @kernel(op_type, since=since, dtypes={0: FLOATS}, parse=parse, compiled="activation")
        def bind(b: Bind, p: Any) -> None:
            x = b.array(0)
            wide = widened(b, x)
            if wide.dtype == np.float32 and takes(x.shape, [wide]) and b.compiled("activation") is not None:
                _in_one_pass(b, op_type, x, wide, p)
                return
            y = b.reuse(0, 0)
            if wide is x:
                recipe(b, x, y, p)
            else:
                recipe(b, wide, wide, p)
                b.step(convert, y, wide)

        return recipe

    return register


def _in_one_pass(b: Bind, op_type: str, x: np.ndarray, wide: np.ndarray, p: Any) -> None:
    """The activation as one instruction of the compiled library; its parameters are further operands."""
    library = b.compiled("activation")
    assert library is not None
    if op_type == "Gelu":
        name, parameters = "GeluTanh" if p == "tanh" else "Gelu", tuple[float, ...]()
    else:
        name, parameters = op_type, tuple(p or ())
    program = [(name, *range(1 + len(parameters)))]
    operands = [wide, *(scalar_operand(value) for value in parameters)]
    if wide is x:
        blockwise(b, library, program, operands, 1)
    else:
        into(b, library, program, operands, wide)
        b.step(convert, b.reuse(0, 0), wide)


def _floats(**defaults: float) -> Callable[[Node], tuple[float, ...]]:
    """A parser of float attributes, in the order given, with their defaults."""
    return lambda node: tuple(float(node.attributes.get(name, value)) for name, value in defaults.items())


@kernel("Relu", dtypes={0: NUMBERS}, compiled="activation")
def relu(b: Bind, p: None) -> None:
    """max(x, 0); NaN stays NaN."""
    x = b.array(0)
    library = b.compiled("activation")
    if library is not None and takes(x.shape, [x]):
        blockwise(b, library, [("Relu", 0)], [x], 1)
        return
    clamp(b, x, b.reuse(0, 0), x.dtype.type(0))


@_activation("LeakyRelu", _floats(alpha=0.01))
def leaky_relu(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float]) -> None:
    """x, times alpha where negative."""
    if 0.0 <= p[0] <= 1.0:
        scaled = b.scratch(x.shape, x.dtype)
        b.step(np.multiply, x, x.dtype.type(p[0]), scaled)
        b.step(maximum, x, scaled, y)
        return
    negative = b.scratch(x.shape, x.dtype)
    clamp(b, x, negative, high=x.dtype.type(0))
    b.step(np.multiply, negative, x.dtype.type(p[0]), negative)
    clamp(b, x, y, x.dtype.type(0))
    b.step(np.add, y, negative, y)


def _exponential(b: Bind, x: np.ndarray, y: np.ndarray, inner: float, alpha: float, gamma: float) -> None:
    """gamma (max(x, 0) + alpha (exp(min(x, 0) / inner) - 1))."""
    of = x.dtype.type
    negative = b.scratch(x.shape, x.dtype)
    clamp(b, x, negative, high=of(0))
    if inner != 1.0:
        b.step(np.divide, negative, of(inner), negative)
    b.step(np.expm1, negative, negative)
    b.step(np.multiply, negative, of(alpha), negative)
    clamp(b, x, y, of(0))
    b.step(np.add, y, negative, y)
    if gamma != 1.0:
        b.step(np.multiply, y, of(gamma), y)


@_activation("Elu", _floats(alpha=1.0))
def elu(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float]) -> None:
    """x, or alpha (exp(x) - 1) where negative."""
    _exponential(b, x, y, 1.0, p[0], 1.0)


@_activation("Selu", _floats(alpha=1.67326319217681884765625, gamma=1.05070102214813232421875))
def selu(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float, float]) -> None:
    """gamma times Elu."""
    _exponential(b, x, y, 1.0, p[0], p[1])


@_activation("Celu", _floats(alpha=1.0))
def celu(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float]) -> None:
    """max(x, 0) + min(0, alpha (exp(x / alpha) - 1))."""
    if p[0] <= 0.0:
        b.step(_celu_negative_alpha, x, y, p[0])
        return
    _exponential(b, x, y, p[0], p[0], 1.0)


def _celu_negative_alpha(x: np.ndarray, y: np.ndarray, alpha: float) -> None:
    np.copyto(y, np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha)), "unsafe")


@_activation("ThresholdedRelu", _floats(alpha=1.0))
def thresholded_relu(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float]) -> None:
    """x where above alpha, else 0."""
    rest = b.scratch(x.shape, bool)
    b.step(np.greater, x, x.dtype.type(p[0]), rest)
    b.step(np.logical_not, rest, rest)
    b.step(np.positive, x, y)
    b.step(np.putmask, y, rest, x.dtype.type(0))


@_activation("HardSigmoid", _floats(alpha=0.2, beta=0.5))
def hard_sigmoid(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float, float]) -> None:
    """max(0, min(1, alpha x + beta))."""
    of = x.dtype.type
    b.step(np.multiply, x, of(p[0]), y)
    b.step(np.add, y, of(p[1]), y)
    clamp(b, y, y, of(0), of(1))


@_activation("HardSwish")
def hard_swish(b: Bind, x: np.ndarray, y: np.ndarray, p: None) -> None:
    """x max(0, min(1, x / 6 + 1 / 2))."""
    gate = b.scratch(x.shape, x.dtype)
    hard_sigmoid(b, x, gate, (1.0 / 6.0, 0.5))
    b.step(np.multiply, x, gate, y)


def sigmoid_steps(b: Bind, x: np.ndarray, y: np.ndarray) -> None:
    """Record 1 / (1 + exp(-x)) -> y; y may be x."""
    one = x.dtype.type(1)
    b.step(np.negative, x, y)
    b.step(np.exp, y, y)  # inf for very negative x, whose reciprocal is the 0 that belongs there
    b.step(np.add, y, one, y)
    b.step(np.divide, one, y, y)


@_activation("Sigmoid")
def sigmoid(b: Bind, x: np.ndarray, y: np.ndarray, p: None) -> None:
    """1 / (1 + exp(-x))."""
    sigmoid_steps(b, x, y)


def swish_gate(b: Bind, x: np.ndarray, alpha: float) -> np.ndarray:
    """sigmoid(alpha x), in scratch."""
    gate = b.scratch(x.shape, x.dtype)
    if alpha == 1.0:
        sigmoid_steps(b, x, gate)
    else:
        b.step(np.multiply, x, x.dtype.type(alpha), gate)
        sigmoid_steps(b, gate, gate)
    return gate


@_activation("Swish", _floats(alpha=1.0), since=24)
def swish(b: Bind, x: np.ndarray, y: np.ndarray, p: tuple[float]) -> None:
    """Swish-24: x sigmoid(alpha x)."""
    b.step(np.multiply, x, swish_gate(b, x, p[0]), y)


@kernel("SwiGLU", since=28, dtypes={0: FLOATS, 1: FLOATS}, parse=_floats(alpha=1.0), compiled="activation")
def swiglu(b: Bind, p: tuple[float]) -> None:
    """SwiGLU-28: Swish of the first input times the second; shapes are equal."""
    inputs, library = [b.array(0), b.array(1)], b.compiled("activation")
    if library is not None and inputs[0].shape == inputs[1].shape and takes(inputs[0].shape, inputs):
        program = [("Swish", 0, 2), ("Mul", 3, 1)]
        blockwise(b, library, program, [*inputs, scalar_operand(p[0])], 2)
        return
    gate, value = widened(b, b.array(0)), widened(b, b.array(1))
    product = swish_gate(b, gate, p[0])
    y = b.out(0, gate.shape, b.array(0).dtype)
    b.step(np.multiply, gate, product, product)
    if y.dtype == product.dtype:
        b.step(np.multiply, product, value, y)
    else:
        b.step(np.multiply, product, value, product)
        b.step(convert, y, product)


@_activation("Softsign")
def softsign(b: Bind, x: np.ndarray, y: np.ndarray, p: None) -> None:
    """x / (1 + |x|)."""
    below = b.scratch(x.shape, x.dtype)
    b.step(np.absolute, x, below)
    b.step(np.add, below, x.dtype.type(1), below)
    b.step(np.divide, x, below, y)


def _softplus_steps(b: Bind, x: np.ndarray, y: np.ndarray) -> None:
    """ln(1 + exp(x)) -> y as max(x, 0) + ln(1 + exp(-|x|)), which overflows nowhere; y must not be x."""
    positive = b.scratch(x.shape, x.dtype)
    clamp(b, x, positive, x.dtype.type(0))
    b.step(np.absolute, x, y)
    b.step(np.negative, y, y)
    b.step(np.exp, y, y)
    b.step(np.log1p, y, y)
    b.step(np.add, y, positive, y)


@_activation("Softplus")
def softplus(b: Bind, x: np.ndarray, y: np.ndarray, p: None) -> None:
    """ln(1 + exp(x))."""
    _softplus_steps(b, x, y)


@_activation("Mish", since=18)
def mish(b: Bind, x: np.ndarray, y: np.ndarray, p: None) -> None:
    """Mish-18: x tanh(softplus(x))."""
    gate = b.scratch(x.shape, x.dtype)
    _softplus_steps(b, x, gate)
    b.step(np.tanh, gate, gate)
    b.step(np.multiply, x, gate, y)


def _parse_gelu(node: Node) -> str:
    approximate = str(node.attributes.get("approximate", "none"))
    if approximate not in ("none", "tanh"):
        raise Unsupported(f"approximate={approximate!r}, the kernel takes 'none' and 'tanh'")
    return approximate


@_activation("Gelu", _parse_gelu, since=20)
def gelu(b: Bind, x: np.ndarray, y: np.ndarray, p: str) -> None:
    """Gelu-20: x / 2 (1 + erf(x / sqrt 2)), or with tanh(sqrt(2 / pi) (x + 0.044715 x^3)) for erf."""
    of = x.dtype.type
    gate = b.scratch(x.shape, x.dtype)
    if p == "none":
        b.step(np.multiply, x, of(math.sqrt(0.5)), gate)
        erf_steps(b, gate, gate)
    else:
        b.step(np.multiply, x, x, gate)
        b.step(np.multiply, gate, of(0.044715), gate)
        b.step(np.add, gate, of(1), gate)
        b.step(np.multiply, gate, x, gate)
        b.step(np.multiply, gate, of(math.sqrt(2.0 / math.pi)), gate)
        b.step(np.tanh, gate, gate)
    b.step(np.add, gate, of(1), gate)
    b.step(np.multiply, gate, of(0.5), gate)
    b.step(np.multiply, x, gate, y)


def _prelu(x: np.ndarray, slope: np.ndarray, y: np.ndarray, product: np.ndarray, positive: np.ndarray) -> None:
    np.multiply(x, slope, product)
    np.greater_equal(x, 0, positive)
    np.copyto(y, product)
    np.copyto(y, x, "same_kind", positive)


@kernel("PRelu", dtypes={0: NUMBERS}, compiled="activation")
def prelu(b: Bind, p: None) -> None:
    """PRelu-16: x, times slope where negative; slope broadcasts to x. Before opset 7 it is one number per channel."""
    x, slope = b.array(0), b.array(1)
    if b.node.opset < 7 and slope.size > 1:
        slope = b.reshaped(slope, slope.shape + (1,) * (x.ndim - 2))
    if np.broadcast_shapes(x.shape, slope.shape) != x.shape:
        raise ValueError(f"PRelu {b.node.name}: slope {slope.shape} does not broadcast to {x.shape}")
    library = b.compiled("activation")
    if library is not None and takes(x.shape, [x, slope]):
        blockwise(b, library, [("LeakyRelu", 0, 1)], [x, slope], 1)
        return
    y = b.out(0, x.shape, x.dtype)
    b.step(_prelu, x, slope, y, b.scratch(x.shape, x.dtype), b.scratch(x.shape, bool))


def _parse_dropout(node: Node) -> tuple[float, int | None]:
    seed = node.attributes.get("seed")
    return float(node.attributes.get("ratio", 0.5)), None if seed is None else int(seed)


def _dropped(x: np.ndarray, y: np.ndarray, mask: np.ndarray, ratio: float, seed: int | None) -> None:
    np.greater_equal(np.random.RandomState(seed).uniform(0.0, 1.0, x.shape), ratio, mask)
    kept = np.where(mask, x.astype(np.float64) if is_half(x.dtype) else x, 0)
    np.copyto(y, kept * (1.0 / (1.0 - ratio) if ratio < 1.0 else 0.0), "unsafe")


@kernel("Dropout", since=7, dtypes={0: FLOATS}, parse=_parse_dropout)
def dropout(b: Bind, p: tuple[float, int | None]) -> None:
    """Dropout-13: the input itself and a mask of True; with training_mode the scaled rest of it.

    Before opset 10 the mask has the type of the input.
    """
    x = b.array(0)
    mask = bool if b.node.opset >= 10 else x.dtype
    training = b.has(2) and bool(b.const(2).reshape(-1)[0])
    ratio = float(b.const(1).reshape(-1)[0]) if training and b.has(1) else p[0]
    if training and ratio > 0.0:
        b.step(_dropped, x, b.out(0, x.shape, x.dtype), b.out(1, x.shape, mask), ratio, p[1])
        return
    b.view(0, x)
    if b.wanted(1):
        b.step(b.out(1, x.shape, mask).fill, True)
