"""The unbound stretch as a block of its own (`stretch.py`): the same bits as op by op, and bound once per shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from outrider.providers.contract import KernelError, Unit
from outrider.providers.cpu import CpuProvider, stretch
from outrider.providers.cpu.control import BINDINGS
from outrider.providers.cpu.program import CpuProgram
from outrider.providers.cpu.stretch import Stretch
from tests.oracle import run_ort
from tests.program_harness import Bound, graph_of, model, ready, unit_of

pytestmark = pytest.mark.fast

# What is above zero, through eight ops and more.
ONE = """agraph (float[N] x) => (float[M] y, int64[1] n) <int64[1] zero = {0}> {
    z = NonZero(x) i = Squeeze(z, zero) f = Gather(x, i) a = Sqrt(f) b = Exp(a) c = Add(b, f) d = Mul(c, a)
    e = Softmax(d) g = Concat<axis=0>(e, f) h = Sub(g, g) y = Add(h, g) n = Shape(y)
}"""
# Then what of that is above its mean, and so on.
TWO = """agraph (float[N] x) => (float[M] y) <int64[1] zero = {0}> {
    z = NonZero(x) i = Squeeze(z, zero) f = Gather(x, i) a = Sqrt(f) b = Exp(a) c = ReduceMean(b) d = Sub(b, c)
    e = Relu(d) z2 = NonZero(e) i2 = Squeeze(z2, zero) f2 = Gather(e, i2) a2 = Sqrt(f2) b2 = Neg(a2) c2 = Exp(b2)
    d2 = Add(c2, f2) e2 = Mul(d2, d2) g2 = Sub(e2, c2) h2 = Tanh(g2) y = Concat<axis=0>(h2, a)
}"""
# A branch that the data chooses, and a name from around it.
BRANCH = """agraph (float[N] x) => (float[M] y) <float limit = {2}, int64[1] zero = {0}> {
    z = NonZero(x) i = Squeeze(z, zero) f = Gather(x, i) s = ReduceSum<keepdims=0>(f) c = Greater(s, limit)
    t = If (c) <then_branch = more () => (float[M] p) { q = Neg(f) p = Exp(q) },
                else_branch = less () => (float[M] p) { p = Sqrt(f) }>
    a = Add(t, f) b = Mul(a, a) d = Relu(b) y = Concat<axis=0>(d, t)
}"""


@contextmanager
def program_of(text: str, level: str = "basic") -> Iterator[tuple[CpuProvider, CpuProgram, Unit]]:
    provider = ready(CpuProvider())
    with graph_of(model(text)) as graph:
        unit = unit_of(graph, level)
        program = provider.compile(unit)
        yield provider, program, unit
        provider.unload(program)
    provider.close()


def stretches(program: CpuProgram) -> int:
    """How many blocks the latest binding has inside one another."""
    binding, count = program._lineage.last, 0
    while binding is not None:
        [inner] = [late for late in binding.late if isinstance(late, Stretch)] or [None]
        binding, count = (None, count) if inner is None else (inner.body.lineage.last, count + 1)
    return count


def inputs(count: int, seed: int, size: int = 12) -> dict[str, Any]:
    """`count` numbers in [0.1, 1.1) among zeros."""
    rng = np.random.default_rng(seed)
    x = np.zeros(size, np.float32)
    x[rng.choice(size, count, replace=False)] = rng.random(count) + 0.1
    return {"x": x}


@pytest.mark.parametrize("level", ["basic", "all"])
@pytest.mark.parametrize(("text", "deep"), [(ONE, 1), (TWO, 2), (BRANCH, 1)])
def test_results_are_those_of_onnxruntime_and_bit_equal_to_those_op_by_op(
    text: str, deep: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "LEAST", 4)
    feeds = [inputs(count, seed) for seed, count in enumerate((5, 3, 5, 9, 12, 3, 1))]
    with program_of(text, level) as (_, program, unit):
        bound = Bound(program, unit, feeds[0])
        results = [bound.run(feed) for feed in feeds]
        assert stretches(program) >= deep
    monkeypatch.setattr(stretch, "LEAST", 1000)
    with program_of(text, level) as (_, program, unit):
        plain = Bound(program, unit, feeds[0])
        for feed, got in zip(feeds, results, strict=True):
            assert [one.tobytes() for one in plain.run(feed)] == [one.tobytes() for one in got]
        assert stretches(program) == 0
    for feed, got in zip(feeds, results, strict=True):
        for one, other in zip(got, run_ort(model(text).SerializeToString(), feed).values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_shape_that_comes_again_is_bound_already() -> None:
    with program_of(ONE) as (_, program, unit):
        bound = Bound(program, unit, inputs(5, 0))
        for seed in range(6):
            bound.run(inputs((5, 7)[seed % 2], seed))
        [one] = [late for late in program._lineage.last.late if isinstance(late, Stretch)]
        assert sum(one.body.lineage.counts.values()) == 2
        assert program.unbound_nodes == 12  # before the shapes of a run are known


def test_shapes_that_keep_changing_are_run_op_by_op() -> None:
    size = 4 * BINDINGS
    with program_of(ONE) as (_, program, unit):
        bound = Bound(program, unit, inputs(1, 0, size))
        for count in range(1, 2 * BINDINGS):
            feed = inputs(count, count, size)
            [y, n] = bound.run(feed)
            f = feed["x"][feed["x"] > 0]
            np.testing.assert_array_equal(y[count:], f)
            assert n.tolist() == [2 * count]
        [one] = [late for late in program._lineage.last.late if isinstance(late, Stretch)]
        assert sum(one.body.lineage.counts.values()) == BINDINGS + 1


def test_a_program_for_another_shape_of_its_inputs_has_its_own_stretch() -> None:
    with program_of(TWO) as (_, program, unit):
        for size in (12, 16, 20, 14, 20):  # primed, rebuilt, replayed
            for seed in range(2):
                feed = inputs(9, seed, size)
                [got] = Bound(program, unit, feed).run()
                [expected] = run_ort(model(TWO).SerializeToString(), feed).values()
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert stretches(program) == 2


def test_random_operators_give_other_numbers_in_each_run() -> None:
    text = ONE.replace("h = Sub(g, g)", "h = RandomNormalLike(g)")
    with program_of(text) as (_, program, unit):
        bound = Bound(program, unit, inputs(5, 0))
        first, second = bound.run()[0], bound.run()[0]
        assert stretches(program) == 1 and (first != second).all()


def test_strings_and_sequences_keep_it_op_by_op_around_them() -> None:
    text = """agraph (float[N] x) => (float[M] y) <int64[1] zero = {0}, int64 at = {0}> {
        z = NonZero(x) i = Squeeze(z, zero) f = Gather(x, i) s = SequenceConstruct(f, f) g = SequenceAt(s, at)
        a = Sqrt(g) b = Exp(a) c = Add(b, g) d = Mul(c, a) e = Softmax(d) h = Neg(e) k = Exp(h) y = Sub(k, g)
    }"""
    feed = inputs(5, 0)
    with program_of(text) as (_, program, unit):
        [got] = Bound(program, unit, feed).run()
    [expected] = run_ort(model(text).SerializeToString(), feed).values()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_an_error_names_its_node() -> None:
    text = ONE.replace("g = Concat<axis=0>(e, f)", "two = Shape(x) w = Reshape(e, two) g = Concat<axis=0>(w, f)")
    with program_of(text) as (_, program, unit):
        bound = Bound(program, unit, inputs(12, 0))
        bound.run()
        assert stretches(program) == 1
        with pytest.raises(KernelError, match="Reshape") as caught:
            bound.run(inputs(5, 0))
        assert caught.value.op == "ai.onnx::Reshape"
        bound.run(inputs(12, 1))
