"""String kernels against onnx.reference; random kernels by their distribution and their seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_harness import check, plain_node, run_node
from onnx import TensorProto, helper

from outrider.providers.cpu.kernels.frame import Unsupported, find

pytestmark = pytest.mark.fast


def words(*items: str) -> np.ndarray:
    return np.array(items, object)


def test_concat() -> None:
    check("StringConcat", [words("a", "b"), words("c")], oracle="reference", bound=False)
    check("StringConcat", [words("a").reshape(1, 1), words("x", "")], oracle="reference", bound=False)


def test_full_match() -> None:
    pattern = r"(\w+)@(\w+)\.com"
    x = words("a@b.com", "a@b.com ", "", "x@y.org")
    check("RegexFullMatch", [x], oracle="reference", bound=False, pattern=pattern)


def test_a_bad_pattern_is_refused_with_the_reason() -> None:
    node = plain_node(helper.make_node("RegexFullMatch", ["x"], ["y"], pattern="("), 20, [words("a")], ["bool"])
    with pytest.raises(Unsupported, match="no regular expression"):
        find(node).parsed(node)


@pytest.mark.parametrize("attributes", [{}, {"delimiter": "-"}, {"delimiter": "", "maxsplit": 1}])
def test_split(attributes: dict[str, Any]) -> None:
    x = words("a b  c", "d-e-f", "", "g").reshape(2, 2)
    expected = [str(item).split(attributes.get("delimiter") or None, attributes.get("maxsplit", -1)) for item in x.flat]
    width = max(map(len, expected))
    padded = np.array([parts + [""] * (width - len(parts)) for parts in expected], object).reshape(2, 2, width)
    counts = np.array([len(parts) for parts in expected]).reshape(2, 2)
    check("StringSplit", [x], outputs=2, oracle=[padded, counts], bound=False, **attributes)


NORMALIZED = [  # case_change_action, is_case_sensitive, what is left of the words below
    ("NONE", 1, ["monday", "Tuesday", "Wednesday"]),
    ("NONE", 0, ["Wednesday"]),
    ("LOWER", 1, ["monday", "tuesday", "wednesday"]),
    ("LOWER", 0, ["wednesday"]),
    ("UPPER", 1, ["MONDAY", "TUESDAY", "WEDNESDAY"]),
    ("UPPER", 0, ["WEDNESDAY"]),
]


@pytest.mark.parametrize(("action", "sensitive", "left"), NORMALIZED)
def test_normalizer(action: str, sensitive: int, left: list[str]) -> None:
    x = words("monday", "Tuesday", "tuesday", "Wednesday")
    attributes = {"case_change_action": action, "is_case_sensitive": sensitive, "stopwords": ["Monday", "tuesday"]}
    check("StringNormalizer", [x], oracle=[words(*left)], bound=False, **attributes)
    check("StringNormalizer", [x.reshape(1, 4)], oracle=[words(*left).reshape(1, -1)], bound=False, **attributes)
    check("StringNormalizer", [words("tuesday")], oracle=[words("")], bound=False, **attributes)


def _draw(op: str, inputs: list[np.ndarray], expected: str, **attributes: Any) -> np.ndarray:
    proto = helper.make_node(op, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes)
    result = run_node(plain_node(proto, 22, inputs, [expected]), inputs)[0]
    assert isinstance(result, np.ndarray)
    assert result.dtype == np.dtype(expected)
    return result


def test_normal_and_uniform() -> None:
    normal = _draw("RandomNormal", [], "float32", shape=[100, 100], mean=2.0, scale=3.0, seed=1.0)
    assert abs(normal.mean() - 2) < 0.15
    assert abs(normal.std() - 3) < 0.15
    uniform = _draw("RandomUniformLike", [np.zeros((100, 100))], "float64", low=-1.0, high=3.0, seed=1.0)
    assert uniform.min() >= -1
    assert uniform.max() < 3
    assert abs(uniform.mean() - 1) < 0.1
    _draw("RandomNormalLike", [np.zeros(3, np.float32)], "float16", dtype=TensorProto.FLOAT16)


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    draws = [_draw("RandomUniform", [], "float32", shape=[8], **seed) for seed in ({"seed": 5.0},) * 2 + ({},) * 2]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[2] != draws[3]).any()
    assert not find(plain_node(helper.make_node("RandomUniform", [], ["y"]), 22, [], ["float32"])).deterministic


def test_bernoulli() -> None:
    p = np.repeat(np.array([[0.0], [0.3], [1.0]], np.float32), 10000, axis=1)
    drawn = _draw("Bernoulli", [p], "int32", seed=2.0, dtype=TensorProto.INT32)
    assert set(np.unique(drawn)) == {0, 1}
    assert drawn[0].max() == 0
    assert drawn[2].min() == 1
    assert abs(drawn[1].mean() - 0.3) < 0.02


def test_multinomial() -> None:
    odds = np.log(np.array([[0.2, 0.3, 0.5], [1e-9, 1.0, 1e-9]], np.float32))
    drawn = _draw("Multinomial", [odds], "int32", sample_size=10000, seed=3.0)
    assert drawn.shape == (2, 10000)
    np.testing.assert_allclose(np.bincount(drawn[0], minlength=3) / 10000, [0.2, 0.3, 0.5], atol=0.03)
    assert (drawn[1] == 1).all()
