"""Results are the caller's own: writable, contiguous, unchanged by later runs, and alive after all else is gone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest

import outrider
from outrider.scheduler.errors import (
    DtypeMismatchError,
    InputNotFoundError,
    InputTypeError,
    OutOfMemoryError,
    OutputNotFoundError,
    OutriderError,
    RankMismatchError,
    SessionClosedError,
    ShapeMismatchError,
    SymbolConflictError,
)
from tests.builders import model, node, tensor
from tests.gates import end
from tests.leaks import worker_pids

SIZES = {"small": 4, "large": 1 << 18}  # elements: copied, and leased from the worker's output pool
TWICE = model([node("Add", "x x", "y")], [tensor("x", ["N"])], [tensor("y", None)])


@pytest.fixture(scope="module")
def options() -> Iterator[outrider.SessionOptions]:
    """One worker for the tests that do not kill it."""
    with outrider.Fleet(["cpu"]) as fleet:
        yield outrider.SessionOptions(fleet=fleet)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_results_are_the_callers_own(size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    session = outrider.InferenceSession(TWICE)
    (first,) = session.run(None, {"x": x})
    assert first.flags.writeable
    assert first.flags.c_contiguous
    assert first.flags.aligned
    later = [session.run(None, {"x": x + i})[0] for i in range(1, 5)]
    np.testing.assert_array_equal(first, 2 * x)
    first[...] = -1  # writing to one changes no other
    for i, result in enumerate(later, 1):
        np.testing.assert_array_equal(result, 2 * (x + i))
    kept = [later[0], later[1][1:], np.from_dlpack(later[2]), memoryview(later[3])]
    (pid,) = worker_pids()
    end(pid)
    del later
    (again,) = session.run(None, {"x": x})  # of its successor, which writes to the same pool
    session.close()
    np.testing.assert_array_equal(again, 2 * x)
    np.testing.assert_array_equal(kept[0], 2 * (x + 1))
    np.testing.assert_array_equal(kept[1], 2 * (x + 2)[1:])
    np.testing.assert_array_equal(kept[2], 2 * (x + 3))
    np.testing.assert_array_equal(np.asarray(kept[3]), 2 * (x + 4))
    kept[0][0] = 7
    assert kept[0][0] == 7


def test_inputs_are_not_kept(options: outrider.SessionOptions) -> None:
    x = np.ones(1000, np.float32)
    with outrider.InferenceSession(TWICE, options=options) as session:
        (y,) = session.run(None, {"x": x})
        x[...] = 5
        np.testing.assert_array_equal(y, 2)
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], 10)


def test_one_value_under_two_names_gives_two_arrays(options: outrider.SessionOptions) -> None:
    raw = model(
        [node("Neg", "x", "y"), node("Identity", "y", "z")],
        [tensor("x", ["N"])],
        [tensor(name, None) for name in "yzx"],
    )
    x = np.ones(1 << 16, np.float32)
    with outrider.InferenceSession(raw, options=options) as session:
        y, z, same, again = session.run(["y", "z", "x", "y"], {"x": x})
    y[0] = z[1] = same[2] = again[3] = 9
    for array, place, value in ((y, 0, -1), (z, 1, -1), (same, 2, 1), (again, 3, -1)):
        assert array[place] == 9
        assert (np.delete(array, place) == value).all()
    assert (x == 1).all()


def test_many_results_held_at_once(options: outrider.SessionOptions) -> None:
    with outrider.InferenceSession(TWICE, options=options) as session:
        held = [session.run(None, {"x": np.full(1 << 16, i, np.float32)})[0] for i in range(50)]
    for i, result in enumerate(held):
        assert (result == 2 * i).all()


GOOD = {"x": np.ones((2, 3), np.float32), "z": np.ones((2, 3), np.float32)}
# what is wrong -> (outputs, feed, error)
BAD = {
    "no mapping": (None, [1, 2], InputTypeError),
    "unknown output": (["nope"], GOOD, OutputNotFoundError),
    "unknown input": (None, {**GOOD, "nope": GOOD["x"]}, InputNotFoundError),
    "missing input": (None, {"x": GOOD["x"]}, InputNotFoundError),
    "not a tensor": (None, {**GOOD, "x": object()}, InputTypeError),
    "dtype": (None, {**GOOD, "x": np.ones((2, 3))}, DtypeMismatchError),
    "rank": (None, {**GOOD, "x": np.ones(3, np.float32)}, RankMismatchError),
    "dimension": (None, {**GOOD, "x": np.ones((2, 4), np.float32)}, ShapeMismatchError),
    "symbols": (None, {**GOOD, "x": np.ones((5, 3), np.float32)}, SymbolConflictError),
}


def test_after_each_bad_feed_the_next_good_one_is_right(options: outrider.SessionOptions) -> None:
    raw = model([node("Add", "x z", "y")], [tensor("x", ["N", 3]), tensor("z", ["N", 3])], [tensor("y", None)])
    with outrider.InferenceSession(raw, options=options) as session:
        for outputs, feed, kind in BAD.values():
            with pytest.raises(kind):
                session.run(outputs, feed)
            np.testing.assert_array_equal(session.run(None, GOOD)[0], 2)


def test_a_value_that_memory_cannot_hold_is_a_typed_error_and_the_session_lives(
    options: outrider.SessionOptions,
) -> None:
    raw = model(
        [node("Expand", "x n", "big", name="grow"), node("Neg", "big", "y")],
        [tensor("x", [1]), tensor("n", [1], onnx.TensorProto.INT64)],
        [tensor("y", None)],
    )
    with outrider.InferenceSession(raw, options=options) as session:
        with pytest.raises(OutOfMemoryError) as caught:
            session.run(None, {"x": np.ones(1, np.float32), "n": np.array([1 << 38], np.int64)})
        assert caught.value.asked >= 1 << 40
        assert caught.value.available < 1 << 40
        (y,) = session.run(None, {"x": np.ones(1, np.float32), "n": np.array([3], np.int64)})
        np.testing.assert_array_equal(y, [-1, -1, -1])


def test_closed_session_says_so(options: outrider.SessionOptions) -> None:
    with outrider.InferenceSession(TWICE, options=options) as session:
        pass
    with pytest.raises(SessionClosedError):
        session.run(None, {"x": np.ones(1, np.float32)})
    session.close()


def test_every_error_of_a_run_is_ours(options: outrider.SessionOptions) -> None:
    """A kernel that fails on its values: the error names node and operator, the worker lives on."""
    raw = model(
        [node("Reshape", "x s", "y", name="shaper")],
        [tensor("x", ["N"])],
        [tensor("y", None)],
        {"s": np.array([2, 3], np.int64)},
    )
    with outrider.InferenceSession(raw, options=options) as session:
        for _ in range(2):
            with pytest.raises(OutriderError) as caught:
                session.run(None, {"x": np.ones(5, np.float32)})
            assert "shaper" in str(caught.value)
            assert "Reshape" in str(caught.value)
            assert session.run(None, {"x": np.ones(6, np.float32)})[0].shape == (2, 3)
        assert session.health()["cpu"]["deaths"] == 0


def test_an_input_with_an_initializer_may_be_fed_and_left_out_in_turn() -> None:
    nodes = [node("Add", "x w", "sum", "add"), node("Reshape", "sum s", "y", "shape"), node("Identity", "w", "same")]
    inputs = [tensor("x", [4]), tensor("w", [4]), tensor("s", [2], onnx.TensorProto.INT64)]
    w, x = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    constants = {"w": w, "s": np.array([2, 2])}
    made = model(nodes, inputs, [tensor("y", ["a", "b"]), tensor("same", [4]), tensor("w", [4])], constants)
    options = outrider.SessionOptions(pins={"shape": "cpu:1"})
    with outrider.InferenceSession(made, providers=["cpu", "cpu:1"], options=options) as session:
        for _ in range(2):
            for feed in ({}, {"w": 10 * w}, {"s": np.array([4, 1])}, {"w": -w, "s": np.array([1, 4])}):
                given = {"w": w, "s": constants["s"], **feed}
                y, same, passed = session.run(None, {"x": x, **feed})
                np.testing.assert_array_equal(y, (x + given["w"]).reshape(given["s"]))
                np.testing.assert_array_equal(same, given["w"])
                np.testing.assert_array_equal(passed, given["w"])
