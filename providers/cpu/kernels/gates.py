"""What recurrent operators have in common: attributes `direction` and `activations` of ONNX LSTM-22, GRU-22, RNN-22.

Each activation function is `apply(x, term)`: x becomes f(x) in place; `term` is scratch of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels.frame import Unsupported
from outrider.providers.wire.graph import Node

Apply = Callable[[np.ndarray, np.ndarray], object]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def parse_direction(node: Node) -> tuple[bool, ...]:
    """For each direction of the node, whether it goes backwards. Raises Unsupported for one that ONNX does not have."""
    direction = str(node.attributes.get("direction", "forward"))
    if direction not in _DIRECTIONS:
        raise Unsupported(f"direction {direction!r}, ONNX has {', '.join(_DIRECTIONS)}")
    return _DIRECTIONS[direction]


@dataclass(frozen=True)
class Activation:
    """A function by its ONNX name; calling it is `apply`."""

    name: str
    apply: Apply

    def __call__(self, x: np.ndarray, term: np.ndarray) -> None:
        self.apply(x, term)


# Default alpha and beta; None: the function has no such number.
DEFAULTS: dict[str, tuple[float | None, float | None]] = {
    "Relu": (None, None),
    "Tanh": (None, None),
    "Sigmoid": (None, None),
    "Affine": (1.0, 0.0),
    "LeakyRelu": (0.01, None),
    "ThresholdedRelu": (1.0, None),
    "ScaledTanh": (1.0, 1.0),
    "HardSigmoid": (0.2, 0.5),
    "Elu": (1.0, None),
    "Softsign": (None, None),
    "Softplus": (None, None),
}
_NAMES = {name.lower(): name for name in DEFAULTS}


def sigmoid(x: np.ndarray, term: np.ndarray) -> None:
    """1 / (1 + exp(-x)), by way of tanh, which cannot overflow."""
    np.multiply(x, 0.5, x)
    np.tanh(x, x)
    np.multiply(x, 0.5, x)
    np.add(x, 0.5, x)


def _softplus(x: np.ndarray, term: np.ndarray) -> None:
    np.logaddexp(x, 0, x)


def _softsign(x: np.ndarray, term: np.ndarray) -> None:
    np.abs(x, term)
    np.add(term, 1, term)
    np.divide(x, term, x)


def _with_numbers(name: str, alpha: float, beta: float) -> Apply:
    def affine(x: np.ndarray, term: np.ndarray) -> None:
        np.multiply(x, alpha, x)
        np.add(x, beta, x)

    def leaky_relu(x: np.ndarray, term: np.ndarray) -> None:
        np.multiply(x, alpha, term)
        np.copyto(x, term, where=x < 0)

    def thresholded_relu(x: np.ndarray, term: np.ndarray) -> None:
        np.copyto(x, 0, where=x < alpha)

    def scaled_tanh(x: np.ndarray, term: np.ndarray) -> None:
        np.multiply(x, beta, x)
        np.tanh(x, x)
        np.multiply(x, alpha, x)

    def hard_sigmoid(x: np.ndarray, term: np.ndarray) -> None:
        affine(x, term)
        np.clip(x, 0, 1, out=x)

    def elu(x: np.ndarray, term: np.ndarray) -> None:
        np.minimum(x, 0, out=term)
        np.expm1(term, term)
        np.multiply(term, alpha, term)
        np.copyto(x, term, where=x < 0)

    functions: dict[str, Apply] = {
        "Affine": affine,
        "LeakyRelu": leaky_relu,
        "ThresholdedRelu": thresholded_relu,
        "ScaledTanh": scaled_tanh,
        "HardSigmoid": hard_sigmoid,
        "Elu": elu,
    }
    return functions[name]


def activation(name: str, alpha: float, beta: float) -> Activation:
    """The function of that name (one of DEFAULTS)."""
    plain: dict[str, Apply] = {
        "Relu": lambda x, term: np.maximum(x, 0, out=x),
        "Tanh": lambda x, term: np.tanh(x, x),
        "Sigmoid": sigmoid,
        "Softsign": _softsign,
        "Softplus": _softplus,
    }
    return Activation(name, plain[name] if name in plain else _with_numbers(name, alpha, beta))


def parse_activations(node: Node, default: Sequence[str], directions: int) -> tuple[tuple[Activation, ...], ...]:
    """The functions of each direction. `activation_alpha` and `_beta` hold numbers for those functions that have one.

    Raises Unsupported for a name that ONNX does not define or a wrong count.
    """
    names = [str(n) for n in node.attributes.get("activations") or list(default) * directions]
    if len(names) != len(default) * directions:
        raise Unsupported(f"{len(names)} activations, {len(default)} for each of {directions} directions are needed")
    alphas = [float(v) for v in node.attributes.get("activation_alpha") or ()]
    betas = [float(v) for v in node.attributes.get("activation_beta") or ()]
    functions = []
    for given in names:
        name = _NAMES.get(given.lower())
        if name is None:
            raise Unsupported(f"activation {given!r}, ONNX has {', '.join(DEFAULTS)}")
        alpha, beta = DEFAULTS[name]
        if alpha is not None and alphas:
            alpha = alphas.pop(0)
        if beta is not None and betas:
            beta = betas.pop(0)
        functions.append(activation(name, alpha or 0.0, beta or 0.0))
    width = len(default)
    return tuple(tuple(functions[d * width : (d + 1) * width]) for d in range(directions))
