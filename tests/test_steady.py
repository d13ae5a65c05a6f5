"""The steady state is a shortcut, not another behaviour: whatever comes between two equal runs, answers stay right."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from outrider.scheduler import Fleet, InferenceSession, SessionOptions, errors
from outrider.scheduler.runner import Runner
from outrider.scheduler.steady import SIGNATURES, Signature
from tests.builders import chain, model, node, tensor
from tests.interrupts import interrupted

pytestmark = pytest.mark.fast

TOUCHY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "own_providers.py") + ":Touchy"
LARGE = 1 << 15  # elements: results of this size are leased, those of smaller ones copied


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(["cpu", "cpu:1", TOUCHY]) as made:
        yield made


def session_on(fleet: Fleet, **options: Any) -> InferenceSession:
    """y = floor(-relu(x)) * w over two workers, z = relu(x) and w returned too; w may be left out."""
    nodes = [
        node("Relu", "x", "z", "first"),
        node("Neg", "z", "n", "second"),
        node("Floor", "n", "e", "third"),
        node("Mul", "e w", "y", "fourth"),
    ]
    inputs, outputs = [tensor("x", ["N"]), tensor("w", [1])], [tensor(name, ["N"]) for name in ("y", "z")]
    made = model(nodes, inputs, [*outputs, tensor("w", [1])], {"w": np.array([2], np.float32)})
    pins = {"first": TOUCHY, "second": "cpu:1", "third": "cpu", "fourth": "cpu:1"}
    return InferenceSession(made, options=SessionOptions(fleet=fleet, pins=pins, **options))


def expected(x: np.ndarray, w: float = 2.0) -> dict[str, np.ndarray]:
    z = np.maximum(x, 0)
    return {"y": np.floor(-z) * np.float32(w), "z": z, "w": np.array([w], np.float32)}


def check(results: list[np.ndarray], names: list[str], x: np.ndarray, w: float = 2.0) -> None:
    wanted = expected(x, w)
    for name, result in zip(names, results, strict=True):
        np.testing.assert_array_equal(result, wanted[name])
        assert result.flags.writeable and result.flags.c_contiguous


RUNS = st.tuples(
    st.sampled_from([1, 3, 3, 3, 40, LARGE]),
    st.sampled_from([None, None, None, ["y"], ["z", "y"], ["w"], ["y", "y", "w"]]),
    st.sampled_from([None, None, 2.0, 5.0]),
    st.sampled_from(["same", "same", "same", "raises", "bad", "strided", "list"]),
)


@settings(deadline=None, derandomize=True, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(RUNS, min_size=8, max_size=30), st.integers(1, 3))
def test_any_order_of_runs(fleet: Fleet, runs: list[tuple[Any, ...]], slots: int) -> None:
    held: list[tuple[list[np.ndarray], list[str], np.ndarray, float]] = []
    with session_on(fleet, max_in_flight=slots) as session:
        for number, (count, names, w, kind) in enumerate(runs):
            x = np.linspace(-1, 1, count, dtype=np.float32) + np.float32(number)
            feed: dict[str, Any] = {"x": x} if w is None else {"x": x, "w": np.array([w], np.float32)}
            if kind == "raises":
                x = x.copy()
                x[0] = -13
                with pytest.raises(errors.KernelError, match="unlucky"):
                    session.run(names, {**feed, "x": x})
                continue
            if kind == "bad":
                with pytest.raises(errors.DtypeMismatchError):
                    session.run(names, {**feed, "x": x.astype(np.float64)})
                continue
            if kind == "strided":
                feed["x"] = np.repeat(x, 2)[::2]
            if kind == "list":
                feed["x"] = x.tolist()
            results = session.run(names, feed)
            check(results, names or ["y", "z", "w"], x, w or 2.0)
            held.append((results, names or ["y", "z", "w"], x, w or 2.0))
        for one in held[-6:]:  # results do not change with later runs
            check(*one)


def test_it_allocates_and_binds_nothing(fleet: Fleet) -> None:
    with session_on(fleet) as session:
        x = np.ones(5, np.float32)
        for _ in range(3):
            session.run(None, {"x": x})
        before = session.stats()
        for number in range(50):
            check(session.run(None, {"x": x * number}), ["y", "z", "w"], x * number)
        after = session.stats()
    assert after["allocated_bytes"] == before["allocated_bytes"]
    for name, counters in after["providers"].items():
        assert counters["bound"] == before["providers"][name]["bound"]
        assert counters["copies"] == before["providers"][name]["copies"]
    assert after["runs"] - before["runs"] == 50
    # x in; y and z out; w passes by
    assert after["copies"] - before["copies"] == 150
    assert after["copied_bytes"] - before["copied_bytes"] == 50 * 3 * x.nbytes


def counted_general_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each run that takes the general way."""
    start, general = Runner._start, []

    def counting(self: Runner, generation: Any, slot: Any) -> None:
        general.append(1)
        start(self, generation, slot)

    monkeypatch.setattr(Runner, "_start", counting)
    return general


def test_shapes_and_choices_of_outputs_may_come_in_turn(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    general = counted_general_runs(monkeypatch)
    nodes = [node("Relu", "x", "z", "first"), node("Neg", "z", "y", "second")]
    built = model(nodes, [tensor("x", ["N"])], [tensor("y", ["N"]), tensor("z", ["N"])])
    kinds = [(5, None), (7, None), (5, ["z"]), (1, ["z", "y"]), (5, ("y",))]
    with InferenceSession(built, options=SessionOptions(fleet=fleet, pins={"first": "cpu"})) as session:
        for turn in range(8):
            for count, names in kinds:
                x = np.linspace(-1, 1, count, dtype=np.float32) + np.float32(turn)
                results = session.run(names, {"x": x})
                made = {"z": np.maximum(x, 0), "y": -np.maximum(x, 0)}
                for name, result in zip(names or ["y", "z"], results, strict=True):
                    np.testing.assert_array_equal(result, made[name])
        assert len(general) == 2 * len(kinds)  # what comes a second time is learnt
        for count in range(20, 20 + 2 * SIGNATURES):  # what was known is forgotten
            session.run(None, {"x": np.ones(count, np.float32)})
        general.clear()
        session.run(None, {"x": np.ones(5, np.float32)})
        assert general == [1]


def test_a_place_that_moves_is_not_written_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    general = counted_general_runs(monkeypatch)
    with session_on(fleet) as session:
        sizes = [3, 3, 4, 3, 4, 1 << 22, 3, 4, 1 << 22, 3]
        for number, count in enumerate(sizes):
            x = np.full(count, 0.5 + number, np.float32)
            check(session.run(None, {"x": x}), ["y", "z", "w"], x)
        assert len(general) < len(sizes)


def test_an_initializer_comes_back_when_it_is_not_fed(fleet: Fleet) -> None:
    with session_on(fleet, max_in_flight=1) as session:
        for number in range(12):
            x = np.full(3, number, np.float32)
            fed = {} if number % 3 else {"w": np.array([5], np.float32)}
            check(session.run(None, {"x": x, **fed}), ["y", "z", "w"], x, 5.0 if fed else 2.0)


@pytest.mark.parametrize("fed", [True, False], ids=["an input", "a constant"])
def test_a_model_that_computes_nothing_may_be_run_again(fleet: Fleet, fed: bool) -> None:
    value = np.array([1, 2], np.float32)
    inputs, constants = ([tensor("x", [2])], {}) if fed else ([], {"x": value})
    made = model([], inputs, [tensor("x", [2])], constants)
    with InferenceSession(made, options=SessionOptions(fleet=fleet)) as session:
        feed = {"x": value} if fed else {}
        target = np.empty(2, np.float32)
        binding = session.io_binding()
        binding.bind_output("x", "cpu", 0, target.dtype, target.shape, target.ctypes.data)
        if fed:
            binding.bind_cpu_input("x", value)
        for _ in range(5):
            np.testing.assert_array_equal(session.run(None, feed)[0], value)
            np.testing.assert_array_equal(session.run_async(None, feed).result()[0], value)
            target[:] = 0
            session.run_with_iobinding(binding)
            np.testing.assert_array_equal(target, value)


@pytest.mark.parametrize("general", [False, True])
def test_an_initializer_comes_back_after_an_interrupted_run_that_was_fed_another(fleet: Fleet, general: bool) -> None:
    """Whichever moment: the feed lies where the initializer lay."""
    x, w = np.ones(3, np.float32), np.array([5], np.float32)
    moment, ended = -1, False
    with session_on(fleet, max_in_flight=1) as session:
        for _ in range(4):
            check(session.run(None, {"x": x}), ["y", "z", "w"], x)
            check(session.run(None, {"x": x, "w": w}), ["y", "z", "w"], x, 5.0)
        kept = session._runner.slots.items[0].steady
        while not ended:
            moment += 1
            with contextlib.suppress(KeyboardInterrupt):
                for fed in ({}, {"w": w}):
                    if general:
                        kept.clear()
                    with interrupted(("runner.py", "scheduler/steady.py"), moment if fed else 1 << 20):
                        check(session.run(None, {"x": x, **fed}), ["y", "z", "w"], x, 5.0 if fed else 2.0)
                ended = True
            if general:
                kept.clear()
            check(session.run(None, {"x": x}), ["y", "z", "w"], x)
    assert moment > 5


def test_results_that_nobody_wants_give_their_blocks_back(fleet: Fleet) -> None:
    nodes = [node("Relu", "x", "z", "first"), node("Shape", "z", "s", "second")]
    outputs = [tensor("z", ["N"]), tensor("s", [1], TensorProto.INT64)]
    built = model(nodes, [tensor("x", ["N"])], outputs)
    x = np.ones(LARGE, np.float32)
    with InferenceSession(built, options=SessionOptions(fleet=fleet, pins={"*": "cpu"})) as session:
        for _ in range(5):
            session.run(["s"], {"x": x})
        before = session.stats()["allocated_bytes"]
        for _ in range(40):
            assert session.run(["s"], {"x": x})[0].tolist() == [LARGE]
        assert session.stats()["allocated_bytes"] == before


def test_large_results_are_steady_too_and_failures_lose_none_of_their_blocks(fleet: Fleet) -> None:
    options = SessionOptions(fleet=fleet, pins={"n0": TOUCHY}, output_memory=12 * LARGE)
    x, bad = np.ones(LARGE, np.float32), np.full(LARGE, -13, np.float32)
    with InferenceSession(chain("Relu", shape=["N"]), options=options) as session:
        held: list[np.ndarray] = []
        for number in range(6):
            held = [session.run(None, {"x": x * number})[0], *held[:1]]  # three blocks in turn
        bound = session.stats()["providers"][TOUCHY]["bound"]
        for number in range(10):
            with pytest.raises(errors.KernelError, match="unlucky"):
                session.run(None, {"x": bad})
            held = [session.run(None, {"x": x * number})[0], *held[:1]]
            assert [result[-1] for result in held] == ([number, number - 1] if number else [0, 5])
        held.clear()
        before = session.stats()
        assert session.run(None, {"x": x})[0].sum() == LARGE
        after = session.stats()
    assert after["copies"] - before["copies"] == 1  # the input: the result is leased
    assert after["providers"][TOUCHY]["bound"] == bound


def test_a_death_in_the_steady_state_is_a_death() -> None:
    x = np.ones(5, np.float32)
    with Fleet(["cpu", "cpu:1", TOUCHY]) as own, session_on(own, replay=False, fallback=False) as session:
        for _ in range(5):
            session.run(None, {"x": x})
        bad = x.copy()
        bad[0] = -666
        with pytest.raises(errors.WorkerDiedError) as caught:
            session.run(None, {"x": bad})
        assert (caught.value.provider, caught.value.signal, caught.value.nodes) == (TOUCHY, "SIGKILL", ["first"])
        for _ in range(5):
            check(session.run(None, {"x": x}), ["y", "z", "w"], x)
        assert [one["incarnation"] for one in session.health().values()] == [1, 1, 2]


def test_many_threads_with_two_shapes(fleet: Fleet) -> None:
    wrong: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for turn in range(60):
                x = np.full(3 + (number + turn // 7) % 2, number + turn / 100, np.float32)
                check(session.run(None, {"x": x}), ["y", "z", "w"], x)
        except BaseException as error:
            wrong.append(error)

    with session_on(fleet, max_in_flight=3) as session:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_what_is_no_plain_dict_of_plain_arrays_has_no_signature() -> None:
    x = np.ones(3, np.float32)
    signature = Signature.of({"x": x})
    assert signature is not None
    assert signature.fits({"x": x * 2})
    big = x.astype(">f4")
    others = ({}, {"x": x, "y": x}, {"y": x}, {"x": x[:2]}, {"x": x.tolist()}, {"x": x.astype("f8")}, {"x": big}, [x])
    for feed in others:
        assert not signature.fits(feed)
    assert not signature.fits({"x": np.ma.masked_array(x)})
    assert Signature.of({"x": np.array(["a"], object)}) is None
    assert Signature.of({"x": [x]}) is None
