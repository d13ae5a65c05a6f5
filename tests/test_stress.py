"""Many threads, many runs, shapes that change all the time: every result is checked, and nothing is left."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from outrider.scheduler import Fleet, InferenceSession, OrtValue, SessionOptions, errors
from tests.builders import model, node, tensor

THREADS, RUNS = 8, 1000
TOUCHY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py") + ":Touchy"
SIZES = [1, 2, 3, 5, 8, 13, 40, 100, 333, 1000, 1024, 3000, 5000, 9999, 16_000, 17_000, 20_001, 40_000, 70_000]


def expected(x: np.ndarray) -> list[np.ndarray]:
    negative = np.maximum(x, 0) - abs(x)
    return [negative, np.transpose(np.nonzero(negative)), negative + negative]


def diamond() -> onnx.ModelProto:
    """y = relu(x) - |x|, where it is not 0, and 2 y."""
    nodes = [
        node("Relu", "x", "p", "a"), node("Abs", "x", "q", "b"), node("Sub", "p q", "y", "c"),
        node("NonZero", "y", "where", "d"), node("Transpose", "where", "rows", "e"), node("Add", "y y", "twice", "f"),
    ]  # fmt: skip
    outputs = [tensor("y", ["N"]), tensor("rows", ["K", 1], TensorProto.INT64), tensor("twice", ["N"])]
    return model(nodes, [tensor("x", ["N"])], outputs)


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Call each in a thread of its own; raises what one of them raised."""
    wrong: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]


@pytest.mark.parametrize("slots", [2, 5])
def test_threads_with_changing_shapes_over_partitions(slots: int) -> None:
    """More shapes than an edge has numbers for, results that are copied and leased, a size known only in the run."""
    pins = {"a": "cpu", "b": "cpu:1", "c": "cpu:2", "d": "cpu:1", "e": "cpu:2", "f": "cpu"}

    def run(seed: int, session: InferenceSession) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        for _ in range(RUNS):
            x = rng.standard_normal(int(rng.choice(SIZES[seed % 3 :]))).astype(np.float32)
            held = [*held[-2:], (session.run(None, {"x": x}), expected(x))]
            for results, right in (held[0], held[-1]):
                for result, one in zip(results, right, strict=True):
                    np.testing.assert_array_equal(result, one)

    with Fleet(["cpu", "cpu:1", "cpu:2"]) as fleet:
        options: dict[str, Any] = {"fleet": fleet, "pins": pins, "max_in_flight": slots}
        with InferenceSession(diamond(), options=SessionOptions(**options)) as session:
            assert session.stats()["partitions"] == 6
            at_once([functools.partial(run, seed, session) for seed in range(THREADS)])
            assert session.stats()["runs"] == THREADS * RUNS


MIXED_RUNS = 500  # of each thread


class Mixed:
    """One thread's runs: by `run`, in bursts by `run_async`, with bound memory, of results fed again; some raise."""

    NAMES = ("y", "rows", "twice")

    def __init__(self, session: InferenceSession, seed: int, raising: bool) -> None:
        self.session = session
        self.ways = [self.plain, self.plain, self.some, self.burst, self.bound, self.again]
        self.ways += [self.raising] if raising else []
        self.rng = np.random.default_rng(seed)
        self.held: list[tuple[Any, np.ndarray]] = []
        self.runs = 0
        self.buffers = {size: (session.empty("x", [size]), session.empty("y", [size])) for size in (40, 40_000)}

    def all(self) -> None:
        """All runs of the thread."""
        while self.runs < MIXED_RUNS:
            self.ways[int(self.rng.integers(len(self.ways)))]()
            self.look()

    def look(self) -> None:
        """Check what is held, which later runs must not have touched, and drop some of it."""
        for result, right in (self.held[0], self.held[-1]) if self.held else ():
            np.testing.assert_array_equal(result, right)
        del self.held[: len(self.held) - 6]

    def keep(self, results: list[Any], x: np.ndarray, names: tuple[str, ...] = NAMES) -> None:
        right = dict(zip(self.NAMES, expected(x), strict=True))
        for name, result in zip(names, results, strict=True):
            np.testing.assert_array_equal(result, right[name])
            self.held.append((result, right[name]))
        self.runs += 1

    def input(self) -> np.ndarray:
        return self.rng.standard_normal(int(self.rng.choice(SIZES))).astype(np.float32)

    def plain(self) -> None:
        x = self.input()
        self.keep(self.session.run(None, {"x": x}), x)

    def some(self) -> None:
        x, names = self.input(), (("twice",), ("rows", "y"), ("y", "twice"))[int(self.rng.integers(3))]
        self.keep(self.session.run(names, {"x": x}), x, names)

    def burst(self) -> None:
        given = [self.input() for _ in range(int(self.rng.integers(1, 7)))]
        for x, future in [(x, self.session.run_async(None, {"x": x})) for x in given]:
            self.keep(future.result(), x)

    def bound(self) -> None:
        x, y = self.buffers[int(self.rng.choice([40, 40_000]))]
        x[...] = self.rng.standard_normal(x.size)
        binding = self.session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_ortvalue_output("y", OrtValue.ortvalue_from_numpy(y))
        binding.bind_output("twice")
        self.session.run_with_iobinding(binding)
        right = expected(x)
        np.testing.assert_array_equal(y, right[0])
        self.keep([binding.get_outputs()[1].numpy()], x.copy(), ("twice",))

    def again(self) -> None:
        """An earlier result as the input, which may lie where the workers can read it."""
        x = self.held[-1][0] if self.held and self.held[-1][0].ndim == 1 else self.input()
        self.keep(self.session.run(None, {"x": x}), x)

    def raising(self) -> None:
        x = self.input()
        x[0] = -13
        with pytest.raises(errors.KernelError, match="unlucky"):
            self.session.run(None, {"x": x})


@pytest.mark.parametrize("strategy", ["priority", "replicate"])
def test_threads_that_run_in_every_way_at_once(strategy: str) -> None:
    providers = [TOUCHY, "cpu", "cpu:1", "cpu:2"] if strategy == "priority" else ["cpu", "cpu:1"]
    pins = {"a": TOUCHY, "b": "cpu:1", "c": "cpu:2", "d": "cpu:1", "e": "cpu:2", "f": "cpu"}
    options: dict[str, Any] = {"strategy": strategy, "pins": pins if strategy == "priority" else {}}
    with InferenceSession(
        diamond(), providers=providers, options=SessionOptions(**options, max_in_flight=3)
    ) as session:
        threads = [Mixed(session, seed, raising=strategy == "priority") for seed in range(THREADS)]
        at_once([mixed.all for mixed in threads])
        assert session.stats()["runs"] == sum(mixed.runs for mixed in threads)
        for mixed in threads:
            mixed.look()
