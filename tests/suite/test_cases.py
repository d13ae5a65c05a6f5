"""The suite's loader and comparator: complete, and not to be fooled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from outrider.tools.conformance.compare import difference
from outrider.tools.conformance.suite import load_suite

pytestmark = pytest.mark.fast


def test_all_kinds_are_there() -> None:
    suite = load_suite()
    kinds = Counter(suite.read(name).kind for name in suite.names())
    if onnx.__version__ == "1.23.2":
        assert dict(kinds) == {
            "node": 1884, "real": 9, "simple": 23, "pytorch-converted": 82, "pytorch-operator": 35
        }  # fmt: skip
    assert len(kinds) == 5


@pytest.mark.parametrize(
    "name",
    [
        "test_add",
        "test_cast_FLOAT_to_BFLOAT16",
        "test_identity_sequence",
        "test_optional_get_element_sequence",
        "test_sequence_insert_at_front",
        "test_loop16_seq_none",
        "test_Conv2d_padding",
        "test_equal_string",
    ],
)
def test_cached_case_is_what_the_reference_computes(name: str) -> None:
    case = load_suite().read(name)
    reference = ReferenceEvaluator(onnx.load_from_string(case.model))
    assert case.data
    for inputs, expected in case.data:
        assert difference(expected, list(reference.run(None, inputs)), case.rtol, case.atol) is None


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        ([np.zeros(2)], [], "0 values instead of 1"),
        ([np.zeros(2)], [np.zeros((2, 1))], "shape (2, 1)"),
        ([np.zeros(2)], [np.zeros(2, np.float32)], "dtype float32"),
        ([np.zeros(2)], [0.0], "float instead of an array"),
        ([np.ones(2)], [np.array([1, 1.01])], "1 of 2 elements beyond tolerance, first at (1,)"),
        ([np.array(1.0)], [np.array(np.nan)], "1 of 1"),
        ([np.array([True])], [np.array([False])], "1 of 1 elements unequal"),
        ([np.array(["a"], object)], [np.array(["b"], object)], "1 of 1 elements unequal"),
        ([[np.zeros(2)]], [[np.zeros(3)]], "[0] [0] shape"),
        ([[np.zeros(2)]], [np.zeros((1, 2))], "ndarray instead of list"),
        ([None], [np.zeros(1)], "ndarray instead of NoneType"),
        ([np.ones(1, ml_dtypes.bfloat16)], [np.full(1, 1.1, ml_dtypes.bfloat16)], "1 of 1"),
    ],
)
def test_a_difference_is_seen(expected: list[Any], got: list[Any], reason: str) -> None:
    found = difference(expected, got, 1e-3, 1e-7)
    assert found is not None
    assert reason in found


def test_equal_values_do_not_differ() -> None:
    values = [
        np.array([1.0, np.nan, np.inf]),
        None,
        [np.zeros(2), np.array(["a", ""], object)],
        np.ones(2, ml_dtypes.bfloat16),
        np.ones(2, ml_dtypes.int4),
    ]
    assert difference(values, values, 1e-3, 1e-7) is None
