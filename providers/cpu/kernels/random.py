"""Random operators. Each bound node has a generator of its own: with a seed its runs repeat after every load.

Which generator an implementation uses is open in ONNX; this is NumPy's default one (PCG64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.kernels.frame import Bind, Unsupported, kernel
from outrider.providers.cpu.kernels.support import convert, ints
from outrider.providers.wire.dtypes import BY_NUMBER, FLOATS, numpy_dtype
from outrider.providers.wire.graph import Node


@dataclass(frozen=True)
class Draw:
    """Attributes of a random operator. `dtype` is '' where the input's is meant; low and high are also mean, scale."""

    dtype: str
    seed: float | None
    low: float
    high: float
    shape: tuple[int, ...]

    def generator(self) -> np.random.Generator:
        """A fresh generator, seeded by the bits of `seed` where it is given."""
        seed = None if self.seed is None else int(np.float32(self.seed).view(np.uint32))
        return np.random.default_rng(seed)


def _parse(node: Node) -> Draw:
    attributes = node.attributes
    number = attributes.get("dtype")
    dtype = "" if number is None else BY_NUMBER.get(int(number), "")
    if number is not None and not dtype:
        raise Unsupported(f"element type {number} is not known here")
    if not dtype and not node.op_type.endswith("Like"):
        dtype = "float32"
    normal = "Normal" in node.op_type
    low = float(attributes.get("mean" if normal else "low", 0.0))
    high = float(attributes.get("scale" if normal else "high", 1.0))
    seed = attributes.get("seed")
    return Draw(dtype, None if seed is None else float(seed), low, high, tuple(ints(attributes.get("shape", []))))


def _uniform(generator: np.random.Generator, low: float, high: float, y: np.ndarray) -> None:
    convert(y, generator.uniform(low, high, y.shape))


def _normal(generator: np.random.Generator, mean: float, scale: float, y: np.ndarray) -> None:
    convert(y, generator.normal(mean, scale, y.shape))


def _register(op_type: str, fn: Any) -> None:
    @kernel(op_type, parse=_parse, deterministic=False)
    def bind(b: Bind, p: Draw) -> None:
        like = op_type.endswith("Like")
        shape = b.array(0).shape if like else p.shape
        dtype = numpy_dtype(p.dtype) if p.dtype else b.array(0).dtype
        b.step(fn, p.generator(), p.low, p.high, b.out(0, shape, dtype))


for _name, _fn in (("RandomUniform", _uniform), ("RandomNormal", _normal)):
    _register(_name, _fn)
    _register(f"{_name}Like", _fn)


def _parse_samples(node: Node) -> tuple[str, float | None, int]:
    attributes = node.attributes
    number = attributes.get("dtype")
    default = node.inputs[0].dtype if node.op_type == "Bernoulli" else "int32"
    dtype = default if number is None else BY_NUMBER.get(int(number), "")
    if not dtype:
        raise Unsupported(f"element type {number} is not known here")
    seed = attributes.get("seed")
    return dtype, None if seed is None else float(seed), int(attributes.get("sample_size", 1))


def _bernoulli(generator: np.random.Generator, x: np.ndarray, y: np.ndarray) -> None:
    convert(y, generator.random(x.shape) < x)


@kernel("Bernoulli", since=15, dtypes={0: FLOATS}, parse=_parse_samples, deterministic=False)
def bernoulli(b: Bind, p: tuple[str, float | None, int]) -> None:
    """Bernoulli-22: 1 with the probability that the input says, else 0."""
    x = b.array(0)
    generator = Draw(p[0], p[1], 0.0, 1.0, ()).generator()
    b.step(_bernoulli, generator, x, b.out(0, x.shape, numpy_dtype(p[0])))


def _multinomial(generator: np.random.Generator, x: np.ndarray, y: np.ndarray) -> None:
    weights = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True).astype(np.float64))
    bounds = weights.cumsum(axis=1)
    for row, bound in enumerate(bounds):
        draws = generator.random(y.shape[1]) * bound[-1]
        y[row] = np.minimum(np.searchsorted(bound, draws, side="right"), bound.size - 1)


@kernel("Multinomial", since=7, dtypes={0: FLOATS}, parse=_parse_samples, deterministic=False)
def multinomial(b: Bind, p: tuple[str, float | None, int]) -> None:
    """Multinomial-22: class numbers drawn by unnormalised log-probabilities [batch, classes] -> [batch, samples]."""
    x = b.array(0)
    generator = Draw(p[0], p[1], 0.0, 1.0, ()).generator()
    b.step(_multinomial, generator, x, b.out(0, (x.shape[0], p[2]), numpy_dtype(p[0])))
