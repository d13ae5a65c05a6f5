"""Many threads, many runs, shapes that change all the time: every result is checked, and nothing is left."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from outrider.scheduler import Fleet, InferenceSession, SessionOptions
from tests.builders import model, node, tensor

THREADS, RUNS = 8, 1000
SIZES = [1, 2, 3, 5, 8, 13, 40, 100, 333, 1000, 1024, 3000, 5000, 9999, 16_000, 17_000, 20_001, 40_000, 70_000]


def expected(x: np.ndarray) -> list[np.ndarray]:
    negative = np.maximum(x, 0) - abs(x)
    return [negative, np.transpose(np.nonzero(negative)), negative + negative]


@pytest.mark.parametrize("slots", [2, 5])
def test_threads_with_changing_shapes_over_partitions(slots: int) -> None:
    """More shapes than an edge has numbers for, results that are copied and leased, a size known only in the run."""
    nodes = [
        node("Relu", "x", "p", "a"), node("Abs", "x", "q", "b"), node("Sub", "p q", "y", "c"),
        node("NonZero", "y", "where", "d"), node("Transpose", "where", "rows", "e"), node("Add", "y y", "twice", "f"),
    ]  # fmt: skip
    outputs = [tensor("y", ["N"]), tensor("rows", ["K", 1], TensorProto.INT64), tensor("twice", ["N"])]
    proto = model(nodes, [tensor("x", ["N"])], outputs)
    pins = {"a": "cpu", "b": "cpu:1", "c": "cpu:2", "d": "cpu:1", "e": "cpu:2", "f": "cpu"}
    wrong: list[BaseException] = []

    def run(seed: int, session: InferenceSession) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        try:
            for _ in range(RUNS):
                x = rng.standard_normal(int(rng.choice(SIZES[seed % 3 :]))).astype(np.float32)
                held = [*held[-2:], (session.run(None, {"x": x}), expected(x))]
                for results, right in (held[0], held[-1]):
                    for result, one in zip(results, right, strict=True):
                        np.testing.assert_array_equal(result, one)
        except BaseException as error:
            wrong.append(error)

    with Fleet(["cpu", "cpu:1", "cpu:2"]) as fleet:
        options: dict[str, Any] = {"fleet": fleet, "pins": pins, "max_in_flight": slots}
        with InferenceSession(proto, options=SessionOptions(**options)) as session:
            assert session.stats()["partitions"] == 6
            threads = [threading.Thread(target=run, args=(seed, session)) for seed in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrong == []
            assert session.stats()["runs"] == THREADS * RUNS
