"""`outrider::Chain`: a tree of element-wise float32 operators as one node, which fusion makes.

Inputs x0, x1, ... of float32 that broadcast to the output's shape. Attribute `program`: instructions
`[name, operand, ...]`; operand k is input k, or from the number of inputs on the result of instruction k - inputs. The
last instruction makes the output. Names and numbers of operands are those of `blockwise.INSTRUCTIONS`; what is a
parameter in ONNX (alpha, low, ...) is an operand here.

Compiled, the chain is one pass over memory; in NumPy it is its instructions one by one, with few scratch arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels import activations
from outrider.providers.cpu.kernels.binary import power_of
from outrider.providers.cpu.kernels.blockwise import INSTRUCTIONS, Program, blockwise, takes
from outrider.providers.cpu.kernels.elementwise import erf_steps
from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel, order_of
from outrider.providers.cpu.kernels.support import maximum, minimum
from outrider.providers.wire.graph import Node

Recorder = Callable[..., None]  # (b, *operands, y): records name(operands) -> y; y may be one of them


def _parse(node: Node) -> Program:
    program = node.attributes.get("program") or ()
    inputs = len(node.inputs)
    for i, (name, *operands) in enumerate(program):
        if name not in INSTRUCTIONS or len(operands) != INSTRUCTIONS[name][0]:
            raise Unsupported(f"instruction {i} is {name!r} of {len(operands)} operands")
        if not all(isinstance(k, int) and 0 <= k < inputs + i for k in operands):
            raise Unsupported(f"instruction {i} reads {operands}, of {inputs} inputs and {i} earlier results")
    if not program:
        raise Unsupported("the program is empty")
    return tuple((str(name), *(int(k) for k in operands)) for name, *operands in program)


@kernel("Chain", domain="outrider", dtypes={0: {"float32"}}, parse=_parse, compiled="elementwise")
def chain(b: Bind, p: Program) -> None:
    """The program of the module's docstring."""
    inputs = [b.array(i) for i in range(len(b.inputs))]
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    library = b.compiled("elementwise")
    if library is not None and takes(shape, inputs):
        blockwise(b, library, p, inputs, len(inputs))
    else:
        _in_numpy(b, p, inputs)


# In NumPy ------------------------------------------------------------------------------------------------------------
def _in_numpy(b: Bind, program: Program, inputs: Sequence[np.ndarray]) -> None:
    values = list(inputs)
    last = {int(k): i for i, (_, *operands) in enumerate(program) for k in operands}
    order = next((order_of(x) for x in inputs if x.ndim > 2 and order_of(x) is not None), None)
    spare: list[np.ndarray] = []
    for i, (name, *numbers) in enumerate(program):
        operands = [values[int(k)] for k in numbers]
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        dying = [values[int(k)] for k in set(numbers) if int(k) >= len(inputs) and last[int(k)] == i]
        fitting = order if order is not None and len(order) == len(shape) else None
        free = [x for x in (*dying, *spare) if x.shape == shape]
        if i == len(program) - 1:
            y = b.out(0, shape, np.float32, fitting)
        else:
            y = free[0] if free else b.scratch(shape, np.float32, fitting)
        spare = [x for x in (*spare, *dying) if x is not y]
        if y.size:
            _RECORDERS[str(name)](b, *operands, y)
        values.append(y)


def _step(fn: Callable[..., Any]) -> Recorder:
    return lambda b, *places: b.step(fn, *places)


def _relu(x: np.ndarray, y: np.ndarray) -> None:
    np.clip(x, np.float32(0), np.float32(np.inf), y)


def _leaky_relu(x: np.ndarray, slope: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, np.where(x < 0, x * slope, x))


def _hard_sigmoid(x: np.ndarray, alpha: np.ndarray, beta: np.ndarray, y: np.ndarray) -> None:
    np.multiply(x, alpha, y)
    np.add(y, beta, y)
    np.clip(y, np.float32(0), np.float32(1), y)


def _elu(x: np.ndarray, alpha: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, np.where(x < 0, alpha * np.expm1(x), x))


def _selu(x: np.ndarray, alpha: np.ndarray, gamma: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, gamma * np.where(x < 0, alpha * np.expm1(x), x))


def _celu(x: np.ndarray, alpha: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(x / alpha)))


def _thresholded_relu(x: np.ndarray, alpha: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, np.where(x > alpha, x, np.float32(0)))


def _rsqrt(x: np.ndarray, y: np.ndarray) -> None:
    np.sqrt(x, y)
    np.divide(np.float32(1), y, y)


def _where(condition: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, np.where(condition != 0, x, y))


def _mul_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, a * b + c)


def _copy(x: np.ndarray, y: np.ndarray) -> None:
    np.copyto(y, x)


def _swish(b: Bind, x: np.ndarray, alpha: np.ndarray | None, y: np.ndarray) -> None:
    gate = b.scratch(y.shape, y.dtype)
    if alpha is not None:
        b.step(np.multiply, x, alpha, gate)
    activations.sigmoid_steps(b, x if alpha is None else gate, gate)
    b.step(np.multiply, x, gate, y)


def _activation(recipe: activations.Recipe, p: Any = None) -> Recorder:
    return lambda b, x, y: recipe(b, x, y, p)


def _softplus(b: Bind, x: np.ndarray, y: np.ndarray) -> None:
    if x is y:
        x = b.scratch(y.shape, y.dtype)
        b.step(np.copyto, x, y)
    activations.softplus(b, x, y, None)


_RECORDERS: dict[str, Recorder] = {
    "Add": _step(np.add), "Sub": _step(np.subtract), "Mul": _step(np.multiply), "Div": _step(np.divide),
    "Pow": _step(power_of), "Min": _step(minimum), "Max": _step(maximum), "Neg": _step(np.negative),
    "Abs": _step(np.absolute), "Sqrt": _step(np.sqrt), "Rsqrt": _step(_rsqrt), "Exp": _step(np.exp),
    "Log": _step(np.log), "Tanh": _step(np.tanh), "Erf": erf_steps, "Sigmoid": activations.sigmoid_steps,
    "Relu": _step(_relu), "LeakyRelu": _step(_leaky_relu), "HardSigmoid": _step(_hard_sigmoid),
    "HardSwish": _activation(activations.hard_swish), "Reciprocal": _step(lambda x, y: np.divide(np.float32(1), x, y)),
    "Floor": _step(np.floor), "Ceil": _step(np.ceil), "Round": _step(np.rint), "Clip": _step(np.clip),
    "Softplus": _softplus, "Silu": lambda b, x, y: _swish(b, x, None, y),
    "Gelu": _activation(activations.gelu, "none"), "GeluTanh": _activation(activations.gelu, "tanh"),
    "Elu": _step(_elu), "Softsign": _activation(activations.softsign), "Mish": _activation(activations.mish),
    "ThresholdedRelu": _step(_thresholded_relu), "Sign": _step(np.sign), "Less": _step(np.less),
    "LessOrEqual": _step(np.less_equal), "Greater": _step(np.greater), "GreaterOrEqual": _step(np.greater_equal),
    "Equal": _step(np.equal), "Where": _step(_where), "Swish": _swish, "Selu": _step(_selu), "Celu": _step(_celu),
    "Copy": _step(_copy), "MulAdd": _step(_mul_add),
    "NotEqual": _step(np.not_equal),
}  # fmt: skip
