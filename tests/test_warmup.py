"""warmup: programs bound beforehand, typed errors, and what is learned from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from outrider.providers.wire.graph import Value
from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from outrider.scheduler.errors import (
    InputNotFoundError,
    InvalidOptionError,
    RankMismatchError,
    ShapeMismatchError,
    SymbolConflictError,
)
from outrider.scheduler.warming import largest_sizes, made_feeds
from tests.builders import chain, model, node, tensor

pytestmark = pytest.mark.fast

OWN = str(Path(__file__).with_name("own_providers.py"))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1", f"{OWN}:ReluAndAbs", f"{OWN}:PerShape"]) as made:
        yield made


def opened(fleet: Fleet, made: Any, *providers: str, **options: Any) -> InferenceSession:
    return InferenceSession(made, providers=list(providers), options=SessionOptions(fleet=fleet, **options))


def two_inputs() -> Any:
    return model(
        [node("Add", "a b", "c", "add"), node("Neg", "c", "y", "neg")],
        [tensor("a", ("N", 4)), tensor("b", ("N", 4))],
        [tensor("y", ("N", 4))],
    )


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        ({"a": (2, 4)}, InputNotFoundError), ({"a": (2, 4), "b": (2, 4), "z": (1,)}, InputNotFoundError),
        ({"a": (2, 4), "b": (2,)}, RankMismatchError), ({"a": (2, 4), "b": (2, 5)}, ShapeMismatchError),
        ({"a": (2, 4), "b": (3, 4)}, SymbolConflictError), ({"a": ("N", 4), "b": (2, 4)}, InvalidOptionError),
        ({"a": (-1, 4), "b": (2, 4)}, InvalidOptionError), ({"a": 2, "b": (2, 4)}, InvalidOptionError),
        ("a", InvalidOptionError), ([("a", (2, 4))], InvalidOptionError), (None, InvalidOptionError),
    ],
)  # fmt: skip
def test_wrong_names_and_shapes_are_typed_errors(fleet: Fleet, shapes: Any, error: type[Exception]) -> None:
    with opened(fleet, two_inputs(), "cpu") as session:
        with pytest.raises(error):
            session.warmup(shapes)
        assert session.stats()["runs"] == 0
        x = np.ones((2, 4), np.float32)
        assert np.array_equal(session.run(None, {"a": x, "b": x})[0], -2 * x)


def test_every_slot_runs_each_shape_and_the_first_real_run_compiles_nothing(fleet: Fleet) -> None:
    """`PerShape` adds the number of elements that it was compiled for; a compilation shows in the memory it takes."""
    made = chain("Identity", shape=("N", 4))
    with opened(fleet, made, f"{OWN}:PerShape", max_in_flight=3) as session:
        session.warmup([{"x": (1, 4)}, {"x": (2, 4)}])
        assert session.stats()["runs"] == 6
        allocated = session.stats()["allocated_bytes"]
        for _ in range(2):
            futures = [session.run_async(None, {"x": np.ones((2, 4), np.float32)}) for _ in range(3)]
            assert all(np.array_equal(one.result()[0], np.full((2, 4), 9, np.float32)) for one in futures)
        assert session.stats()["allocated_bytes"] == allocated


def test_inputs_are_zeros_of_the_declared_type() -> None:
    inputs = [
        Value("f", "float16", ("N", 2)), Value("s", "string", (None,)), Value("i", "int64", (3,)),
        Value("q", "sequence(int64)"), Value("o", "optional(float32)"), Value("d", "float32", (1,)),
    ]  # fmt: skip
    (feed,) = made_feeds(inputs, {"d"}, {"f": [5, 2], "s": np.array([2])})
    assert (feed["f"].dtype, feed["f"].shape, feed["f"].any()) == (np.float16, (5, 2), False)
    assert feed["s"].tolist() == ["", ""]
    assert (feed["i"].dtype, feed["i"].shape) == (np.int64, (3,))
    assert (feed["q"], feed["o"]) == ([], None)
    assert "d" not in feed
    with pytest.raises(InvalidOptionError, match="only tensors"):
        made_feeds(inputs, (), {"q": (1,)})


def test_sizes_are_the_largest_of_all_feeds() -> None:
    inputs = [Value("a", "float32", ("N", 2, None)), Value("b", "float32"), Value("c", "sequence(float32)", ("N",))]
    feeds = [{"a": np.zeros((3, 2, 1)), "b": np.zeros(5), "c": []}, {"a": np.zeros((1, 2, 9))}]
    assert largest_sizes(inputs, feeds) == {"N": 3}


def test_other_runs_wait_and_go_on(fleet: Fleet) -> None:
    with opened(fleet, chain("Neg", "Exp"), "cpu", "cpu:1", strategy="pipeline") as session:
        wrong: list[object] = []
        stop = threading.Event()

        def caller() -> None:
            x = np.ones((3, 4), np.float32)
            try:
                while not stop.is_set():
                    if not np.allclose(session.run(None, {"x": x})[0], np.exp(-1)):
                        wrong.append("value")
            except Exception as error:
                wrong.append(error)

        callers = [threading.Thread(target=caller) for _ in range(3)]
        for one in callers:
            one.start()
        for batch in (1, 2, 3):
            session.warmup({"x": (batch, 4)})
        stop.set()
        for one in callers:
            one.join()
    assert wrong == []


def test_what_was_measured_is_a_reason_to_move_an_island(fleet: Fleet) -> None:
    """With a symbolic batch the island stays at first: what it would save is not known. Then it was run."""
    made = chain("Neg", "Relu", "Neg", shape=("N", 4))
    with opened(fleet, made, f"{OWN}:ReluAndAbs", "cpu", strategy="cost") as session:
        before = session.placement()
        assert any("warmup()" in note for note in before.notes)
        session.warmup({"x": (1, 4)})
        after = session.placement()
        x = np.array([[1, -1, 2, -2]], np.float32)
        assert np.array_equal(session.run(None, {"x": x})[0], -np.maximum(-x, 0))
    assert [len(one.partitions) for one in (before, after)] == [3, 1]
    assert after.idle_providers == [f"{OWN}:ReluAndAbs"]


def test_stages_are_balanced_by_what_they_took(fleet: Fleet) -> None:
    """The estimates take all products to be alike, as their sizes are symbols; one is 4,000 times another."""
    size = 400
    nodes = [node("MatMul", "x x", "a", "dear"), *(node("MatMul", f"{v} z", w, v) for v, w in ("bc", "cd", "de", "ey"))]
    nodes.insert(1, node("Slice", "a starts ends", "b", "part"))
    constants = {"starts": np.zeros(2, np.int64), "ends": np.full(2, 4, np.int64)}
    made = model(
        nodes,
        [tensor("x", ("N", "N")), tensor("z", ("K", "K"))],
        [tensor("y", ("P", "Q"), TensorProto.FLOAT)],
        constants,
    )
    with opened(fleet, made, "cpu", "cpu:1", strategy="pipeline") as session:
        before = session.placement()
        session.warmup({"x": (size, size), "z": (4, 4)})
        after = session.placement()
    assert [len(one.nodes) for one in before.partitions] == [3, 3]
    assert len(after.partitions[0].nodes) < 3
