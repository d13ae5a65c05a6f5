"""The functions of `vector.h` against float64 over all exponents: within the ulp it states; NaN and inf exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_harness import run_node
from test_chain import chain_node

from tests.native_library import libraries, why_not

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TINY = float(np.finfo(np.float32).tiny)
# name -> (definition, ulp, the smallest result that the bound is for)
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    "Exp": (np.exp, 2, 0.0),
    "Log": (np.log, 2, 0.0),
    "Tanh": (np.tanh, 6, 0.0),
    "Erf": (np.vectorize(math.erf, otypes=[np.float64]), 6, 0.0),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 4, TINY),
    "Softplus": (lambda x: np.logaddexp(x, 0), 4, TINY),
    "Elu": (lambda x: np.where(x < 0, np.expm1(x), x), 3, 0.0),
    "Sqrt": (np.sqrt, 0.5, 0.0),
    "Rsqrt": (lambda x: 1 / np.sqrt(x), 1.5, 0.0),
    "Floor": (np.floor, 0, 0.0),
    "Ceil": (np.ceil, 0, 0.0),
    "Round": (np.rint, 0, 0.0),
}


def floats() -> np.ndarray:
    """Every exponent of both signs, what is near the ends of the functions, and the special values."""
    positive = np.arange(0, 1 << 31, 49_999, dtype=np.int64).astype(np.uint32).view(np.float32)
    near = [np.linspace(-width, width, 20_001, dtype=np.float32) for width in (0.3, 1.5, 10.0, 110.0)]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, TINY, -TINY], np.float32)
    return np.concatenate([positive, -positive, *near, special])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ulp(name: str) -> None:
    found = libraries()
    if found is None:
        pytest.skip(why_not())
    x = floats()
    exact, ulp, smallest = FUNCTIONS[name]
    inputs = [x, np.ones(1, np.float32)] if name == "Elu" else [x]
    got: Any = run_node(chain_node([[name, *range(len(inputs))]], inputs), inputs, None, found[0])[0]
    wanted = exact(x.astype(np.float64))
    rounded = wanted.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(got[~finite], rounded[~finite])
    places = finite & ((np.abs(rounded) >= smallest) | (rounded == 0))
    error = np.abs(got[places].astype(np.float64) - wanted[places])
    unit = np.maximum(np.spacing(np.abs(rounded[places])).astype(np.float64), 2.0**-149)
    worst = np.argmax(error / unit)
    assert error[worst] <= ulp * unit[worst], f"{name} of {x[places][worst]} is off by {error[worst] / unit[worst]} ulp"
    assert np.all(np.abs(got[finite & ~places]) <= 2 * TINY)
