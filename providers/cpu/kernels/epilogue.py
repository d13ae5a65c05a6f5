"""What follows a convolution or a matrix product in the same kernel: bias, activation, affine, residual.

    y = act(factor * product + bias [+ residual before]) * scale + shift [+ residual after]

Fused operators (`outrider::Conv`, `outrider::MatMul`, `com.microsoft::FusedConv`, ...) have the optional inputs bias,
residual, scale, shift at the positions 2 to 5. bias, scale and shift hold one number per feature, [M], or one for all,
[1]; a residual broadcasts to y. `act` is one of ACTIVATIONS with the parameters alpha and beta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.kernels import activations
from outrider.providers.cpu.kernels.frame import Bind, Unsupported
from outrider.providers.cpu.kernels.precision import widened
from outrider.providers.cpu.kernels.support import clamp
from outrider.providers.wire.graph import Node

# Positions of the inputs. PAD is that of `outrider::Conv` alone: what stands beyond the edges, [C] or [1].
BIAS, RESIDUAL, SCALE, SHIFT, PAD = 2, 3, 4, 5, 6

# Activations by name, with the defaults of alpha and beta; the order is that of `enum activation` in epilogue.h.
# Clip: low and high. Silu: x sigmoid(alpha x). GeluTanh: Gelu with approximate='tanh'.
ACTIVATIONS: dict[str, tuple[float, float]] = {
    "": (0.0, 0.0),
    "Relu": (0.0, 0.0),
    "Clip": (-math.inf, math.inf),
    "LeakyRelu": (0.01, 0.0),
    "HardSigmoid": (0.2, 0.5),
    "HardSwish": (0.0, 0.0),
    "Sigmoid": (0.0, 0.0),
    "Tanh": (0.0, 0.0),
    "Gelu": (0.0, 0.0),
    "GeluTanh": (0.0, 0.0),
    "Silu": (1.0, 0.0),
    "Elu": (1.0, 0.0),
}
RESIDUALS = ("", "before", "after")


@dataclass(frozen=True)
class Epilogue:
    """The attributes. `factor` multiplies the product; `residual`: where input RESIDUAL is added, '' for nowhere."""

    activation: str = ""
    alpha: float = 0.0
    beta: float = 0.0
    residual: str = ""
    factor: float = 1.0


def epilogue(activation: str, parameters: list[float], residual: str = "", factor: float = 1.0) -> Epilogue:
    """With as many parameters as are known, else their defaults. Raises Unsupported for what there is not."""
    if activation not in ACTIVATIONS:
        known = ", ".join(name for name in ACTIVATIONS if name)
        raise Unsupported(f"activation is {activation!r}, the kernel takes {known}")
    if residual not in RESIDUALS:
        raise Unsupported(f"residual is {residual!r}, the kernel takes {RESIDUALS[1]!r} and {RESIDUALS[2]!r}")
    alpha, beta = (*parameters, *ACTIVATIONS[activation][len(parameters) :])[:2]
    return Epilogue(activation, float(alpha), float(beta), residual, factor)


def parse_epilogue(node: Node, factor: float = 1.0) -> Epilogue:
    """Of a node of the domain `outrider`: its attributes activation, alpha, beta, residual."""
    get = node.attributes.get
    activation = str(get("activation", ""))
    alpha, beta = ACTIVATIONS.get(activation, (0.0, 0.0))
    parameters = [float(get("alpha", alpha)), float(get("beta", beta))]
    return epilogue(activation, parameters, str(get("residual", "")), factor)


def per_feature(b: Bind, i: int, features: int) -> np.ndarray:
    """Input i of shape [features] or [1], in the dtype to compute in. Raises ValueError for another shape."""
    x = widened(b, i)
    if x.shape not in ((features,), (1,)):
        raise ValueError(f"input {i} {list(x.shape)} does not fit {features} features")
    return x


def finish_product(b: Bind, y: np.ndarray, p: Epilogue, axis: int) -> None:
    """Record the epilogue in place on `y`, which holds the product; `axis` is that of the features."""
    column = (y.shape[axis],) + (1,) * (y.ndim - 1 - axis % y.ndim) if y.ndim else (1,)

    def combine(ufunc: np.ufunc, i: int) -> None:
        if b.has(i):
            x = per_feature(b, i, column[0])
            b.step(ufunc, y, b.reshaped(x, x.shape + column[1:]), y)

    scale(b, y, p.factor)
    combine(np.add, BIAS)
    if p.residual == "before" and b.has(RESIDUAL):
        b.step(np.add, y, widened(b, RESIDUAL), y)
    activate(b, y, p)
    combine(np.multiply, SCALE)
    combine(np.add, SHIFT)
    if p.residual == "after" and b.has(RESIDUAL):
        b.step(np.add, y, widened(b, RESIDUAL), y)


def scale(b: Bind, y: np.ndarray, factor: float) -> None:
    """Record y *= factor."""
    if factor != 1:
        b.step(np.multiply, y, y.dtype.type(factor), y)


def activate(b: Bind, y: np.ndarray, p: Epilogue) -> None:
    """Record y = act(y)."""
    of = y.dtype.type
    if p.activation == "Relu":
        clamp(b, y, y, of(0))
    elif p.activation == "Clip":
        clamp(b, y, y, of(p.alpha), of(p.beta))
    elif p.activation == "LeakyRelu":
        activations.leaky_relu(b, y, y, (p.alpha,))
    elif p.activation == "HardSigmoid":
        activations.hard_sigmoid(b, y, y, (p.alpha, p.beta))
    elif p.activation == "HardSwish":
        activations.hard_swish(b, y, y, None)
    elif p.activation == "Sigmoid":
        activations.sigmoid(b, y, y, None)
    elif p.activation == "Tanh":
        b.step(np.tanh, y, y)
    elif p.activation in ("Gelu", "GeluTanh"):
        activations.gelu(b, y, y, "tanh" if p.activation == "GeluTanh" else "none")
    elif p.activation == "Silu":
        b.step(np.multiply, y, activations.swish_gate(b, y, p.alpha), y)
    elif p.activation == "Elu":
        activations.elu(b, y, y, (p.alpha,))
