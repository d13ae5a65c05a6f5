"""The threads that share out NumPy steps: what is divided, that it is right, and what becomes of errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from outrider.providers.contract import Context
from outrider.providers.cpu import CpuProvider, team
from outrider.providers.cpu.team import Team, parts
from tests.oracle import run_ort
from tests.program_harness import Bound, graph_of, model, unit_of

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def three() -> Iterator[Team]:
    made = Team(3)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "WORTH", 0)


def shares_of(step: Any) -> int:
    """In how many shares a step is done."""
    return len(step.args[0]) if getattr(step.func, "__func__", None) is Team.run else 1


def test_parts_cover_all_items_once() -> None:
    for count in (3, 7, 96, 97, 1000):
        assert [i for part in parts(count, 3) for i in range(count)[part]] == list(range(count))
    assert parts(1000, 2) == [slice(0, 496), slice(496, 1000)]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_elementwise_functions_are_the_same_in_shares(three: Team, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.standard_normal(shape).astype(np.float32)
    cut = data.draw(st.integers(0, len(shape)))
    other = tuple(n if data.draw(st.booleans()) else 1 for n in shape[cut:])
    y = rng.standard_normal(other).astype(np.float32)
    if data.draw(st.booleans()):
        x = np.asfortranarray(x)
    out = x.copy(order="K") if data.draw(st.booleans()) else np.empty(shape[::-1], np.float32).T
    step = three.step(np.multiply, (x, y, out))
    step()
    np.testing.assert_array_equal(out, x * y)
    assert shares_of(step) == (3 if max(shape) >= 3 else 1)
    three.step(np.add, (out, np.float32(1), out))()  # in place
    np.testing.assert_array_equal(out, x * y + 1)
    three.step(np.copyto, (out, y))()
    np.testing.assert_array_equal(out, np.broadcast_to(y, shape))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((7, 5), (5, 11)), ((11, 5), (5, 4)), ((2, 7, 5), (5, 6)), ((4, 1, 7, 5), (3, 5, 2)), ((1, 5), (5, 40)),
        ((1, 5), (5, 1)), ((5,), (5, 3)), ((3, 4, 5), (1, 5, 2)), ((2, 2), (2, 2)),
    ],
)  # fmt: skip
def test_products_are_the_same_in_shares(three: Team, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-9, 9, shape).astype(np.float32) for shape in (left, right))
    y = np.full((x @ w).shape, np.nan, np.float32)
    step = three.step(np.matmul, (x, w, y))
    step()
    np.testing.assert_array_equal(y, x @ w)
    assert shares_of(step) == (3 if x.ndim > 1 and max(y.shape[-2:]) >= 3 or max(y.shape[:-2], default=0) >= 3 else 1)


def test_what_cannot_be_divided_stays_whole(three: Team) -> None:
    memory = np.arange(20.0)
    for fn, args in (
        (np.add, (memory[:-1], 1.0, memory[1:])),  # a share would read what another one writes
        (np.add.reduce, (memory, 0, None, np.empty(()))),
        (np.divmod, (memory, 3.0, np.empty(20), np.empty(20))),
        (memory.fill, (0,)),
    ):
        assert shares_of(three.step(fn, args)) == 1


def test_small_steps_stay_whole(three: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "WORTH", 150_000)
    small, large = np.ones((100, 100), np.float32), np.ones((1000, 1000), np.float32)
    assert [shares_of(three.step(np.add, (x, x, x))) for x in (small, large)] == [1, 3]
    assert [shares_of(three.step(np.matmul, (x, x, x.copy()))) for x in (small, large)] == [1, 3]
    assert (three.shares(1e5), three.shares(1e6)) == (1, 3)


def test_an_error_of_any_share_is_raised_when_all_have_ended(three: Team) -> None:
    done: list[int] = []

    def work(number: int) -> Any:
        def fail() -> None:
            done.append(number)
            if number in bad:
                raise ZeroDivisionError(number)

        return fail

    bad: list[int] = []
    for numbers in ([0], [2], [0, 1, 2]):
        bad[:] = numbers
        done.clear()
        with pytest.raises(ZeroDivisionError):
            three.run([work(number) for number in range(3)])
        assert sorted(done) == [0, 1, 2]
    bad.clear()
    three.run([work(number) for number in range(3)])


def test_threads_end_with_the_provider() -> None:
    before = threading.active_count()
    made = Team(4)
    assert threading.active_count() == before + 3
    made.stop()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "body",
    [
        "w[24, 16, 3, 3] { y = Conv<pads=[1, 1, 1, 1]>(x, w) }",
        "w[24, 16, 3, 3] { y = Conv<strides=[2, 2]>(x, w) }",
        "w[4, 16, 3, 3] { y = Conv<pads=[1, 1, 1, 1]>(x, w) }",
        "w[24, 16, 1, 1] { y = Conv(x, w) }",
        "w[16, 1, 5, 5] { y = Conv<group=16, pads=[2, 2, 2, 2]>(x, w) }",
        "w[16, 1, 3, 3] { y = Conv<group=16, strides=[2, 1]>(x, w) }",
        "w[16, 8, 2, 2] { y = ConvTranspose<strides=[2, 2]>(x, w) }",
        "{ y = Softmax(x) }", "{ y = Softmax<axis=1>(x) }",
        "{ y = LogSoftmax(x) }", "{ y = Erf(x) }", "{ t = Transpose(x) e = Exp(t) y = Add(e, t) }",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 16, 9, 11), (1, 16, 40, 7)])
def test_kernels_agree_with_onnxruntime_in_shares(body: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    weights, brace, nodes = body.partition("{")
    proto = model(f"agraph (float[A, B, C, D] x) => (float[E, F, G, H] y) {brace}{nodes}")
    if weights:
        w = rng.standard_normal([int(n) for n in weights.strip(" w[]").split(",")]).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    feeds = {"x": rng.standard_normal(shape).astype(np.float32)}
    provider = CpuProvider()
    provider.setup(Context({"compiled": False}, 0, 3, logging.getLogger("outrider")))
    with graph_of(proto) as graph:
        unit = unit_of(graph, "all")
        program = provider.compile(unit)
        [got] = Bound(program, unit, feeds).run()
        shared = [step for step in program._lineage.last._bound_steps() if shares_of(step) > 1]
        provider.unload(program)
    provider.close()
    [expected] = run_ort(proto.SerializeToString(), feeds).values()
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    assert shared
