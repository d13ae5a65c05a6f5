"""Programs of the cpu provider: binding, memory planned by lifetime, the unbound stretch, errors."""

from __future__ import annotations

import gc
import logging
import resource
import weakref
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from outrider.providers.contract import ClaimBrokenError, Context, KernelError, ProviderUnavailableError
from outrider.providers.cpu import CpuProvider
from outrider.providers.cpu.arena import Region, Scratch
from outrider.providers.cpu.blocks import Code
from outrider.providers.cpu.items import FIXED, Item, Root
from outrider.providers.cpu.kernels.frame import Bind, find, kernel
from outrider.providers.cpu.records import BOUND, Record
from outrider.providers.cpu.walk import Walk
from outrider.shm.errors import OutOfMemoryError
from tests.program_harness import Bound, check_model, compiled, graph_of, model, ready, run_cpu, unit_of

pytestmark = pytest.mark.fast

X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


# --- results ----------------------------------------------------------------------------------------------------------


def test_chain_with_broadcast_and_constant() -> None:
    proto = model("""agraph (float[N, 6] x) => (float[N, 6] y) <float[6] w = {1, -2, 3, -4, 5, -6}> {
        a = Add(x, w)  b = Relu(a)  c = Mul(b, a)  y = Sub(c, x) }""")
    check_model(proto, {"x": X})


OUTPUTS = {
    "view": "agraph (float[4, 6] x) => (float[6, 4] y) { a = Relu(x) y = Transpose<perm = [1, 0]>(a) }",
    "view of an input": "agraph (float[4, 6] x) => (float[6, 4] y) { y = Transpose<perm = [1, 0]>(x) }",
    "identity of an input": "agraph (float[4, 6] x) => (float[4, 6] y) { y = Identity(x) }",
    "constant": "agraph (float[4, 6] x) => (float[2] y) { y = Constant<value = float[2] {1, 2}>() }",
    "known shape": "agraph (float[N, 6] x) => (int64[2] y) { y = Shape(x) }",
    "read inside": "agraph (float[4, 6] x) => (float[4, 6] y, float[4, 6] z) { y = Relu(x) z = Neg(y) }",
    "two views of one": """agraph (float[4, 6] x) => (float[6, 4] y, float[24] z) <int64[1] flat = {-1}> {
        a = Neg(x) y = Transpose<perm = [1, 0]>(a) z = Reshape(a, flat) }""",
    "unused values": "agraph (float[4, 6] x) => (float[4, 6] y) { unused = Neg(x) more = Relu(unused) y = Abs(x) }",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_no_fresh_results(name: str) -> None:
    check_model(model(OUTPUTS[name]), {"x": X})


def test_duplicate_outputs_each_get_their_own_place() -> None:
    proto = model("agraph (float[4, 6] x) => (float[4, 6] y, float[4, 6] z) { y = Relu(x) z = Identity(y) }")
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"x": X})
        y, z = bound.run()
        assert sorted(bound.places) == [0, 1]
        np.testing.assert_array_equal(y, np.maximum(X, 0))
        np.testing.assert_array_equal(z, y)


def test_shape_arithmetic_is_known_when_bound() -> None:
    proto = model("""agraph (float[N, M] x) => (float[A, B] y) <int64[1] last = {-1}, int64 one = {1}> {
        s = Shape<start = 1>(x)  t = Concat<axis = 0>(last, s)  a = Relu(x)  y = Reshape(a, t) }""")
    with compiled(proto) as (provider, program, unit):
        for rows in (2, 5):
            x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) - 4
            np.testing.assert_array_equal(Bound(program, unit, {"x": x}).run()[0], np.maximum(x, 0))
        assert provider.stats()["unbound_nodes"] == 0
        assert provider.stats()["programs_bound"] == 2


def test_sizes_known_only_in_the_run() -> None:
    proto = model("""agraph (float[N] x) => (int64[1, K] where, float[K] y, float[N] z) {
        where = NonZero(x)  t = Squeeze(where)  a = Cast<to = 1>(t)  y = Neg(a)  z = Abs(x) }""")
    with compiled(proto) as (provider, program, unit):
        bound = Bound(program, unit, {"x": np.array([0, 1, 0, 3], np.float32)})
        where, y, z = bound.run()
        assert where.tolist() == [[1, 3]]
        assert y.tolist() == [-1, -3]
        assert z.tolist() == [0, 1, 0, 3]
        where, y, z = bound.run({"x": np.array([-5, 1, 2, 0], np.float32)})
        assert where.tolist() == [[0, 1, 2]]
        assert y.tolist() == [0, -1, -2]
        assert z.tolist() == [5, 1, 2, 0]
        assert sorted(bound.places) == [2]
        assert provider.stats()["unbound_nodes"] == 4


def test_reshape_by_an_input_that_changes() -> None:
    proto = model("agraph (float[4, 6] x, int64[2] s) => (float[A, B] y) { a = Neg(x) b = Reshape(a, s) y = Relu(b) }")
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"x": X, "s": np.array([8, 3])})
        assert bound.run()[0].shape == (8, 3)
        got = bound.run({"x": X, "s": np.array([-1, 12])})[0]
        np.testing.assert_array_equal(got, np.maximum(-X, 0).reshape(2, 12))


def test_omitted_optional_input_and_unwanted_output() -> None:
    proto = model("""agraph (float[4, 6] x) => (float[4, 6] y, float[2, 6] b) <float top = {1}, int64[2] s = {2, 2}> {
        y = Clip(x, , top)  , b = Split<axis = 0>(x, s) }""")
    check_model(proto, {"x": X}, [np.minimum(X, 1), X[2:]])  # onnxruntime crashes on the omitted output


def test_empty_arrays() -> None:
    proto = model(
        "agraph (float[N, 6] x) => (float[N, 6] y, float[6, N] z) { a = Relu(x) y = Neg(a) z = Transpose(y) }"
    )
    check_model(proto, {"x": np.empty((0, 6), np.float32)})


def test_strings_pass_through_and_an_absent_input_stays_absent() -> None:
    proto = model("agraph (string[N] s) => (string[N] y) { y = Identity(s) }")
    assert run_cpu(proto, {"s": np.array(["a", "ü"], object)})[0].tolist() == ["a", "ü"]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_elementwise_chain_runs_in_one_block() -> None:
    steps = "  ".join(f"a{i + 1} = Neg(a{i})" for i in range(20))
    proto = model(f"agraph (float[1024] x) => (float[1024] y) {{ a0 = Relu(x) {steps} y = Abs(a20) }}")
    with compiled(proto) as (_, program, unit):
        Bound(program, unit, {"x": np.ones(1024, np.float32)}).run()
        assert program.high == 4096


def test_a_read_only_view_of_a_dying_value_is_written_over() -> None:
    proto = model("""agraph (float[2, 3] x) => (float[2, 3] y) <int64[2] s = {2, 3}> {
        a = Floor(x)  b = Expand(a, s)  c = Neg(b)  y = Abs(c) }""")
    with compiled(proto) as (_, program, unit):
        expected = np.abs(np.floor(X[:2, :3]))
        np.testing.assert_array_equal(Bound(program, unit, {"x": X[:2, :3]}).run()[0], expected)
        assert program.high == 64


def test_memory_of_dead_values_is_used_again() -> None:
    steps = "  ".join(f"a{i + 1} = MatMul(a{i}, w)" for i in range(20))
    proto = model(f"""agraph (float[32, 32] x, float[32, 32] w) => (float[32, 32] y) {{
        a0 = Relu(x) {steps} y = Abs(a20) }}""")
    with compiled(proto) as (_, program, unit):
        Bound(program, unit, {"x": np.eye(32, dtype=np.float32), "w": np.eye(32, dtype=np.float32)}).run()
        assert program.high <= 3 * 4096


def test_steady_runs_take_no_memory_and_bind_nothing() -> None:
    proto = model(
        "agraph (float[N, 6] x) => (float[N, 6] y) { a = Relu(x) b = Transpose(a) c = Neg(b) y = Transpose(c) }"
    )
    with compiled(proto) as (provider, program, unit):
        bound = Bound(program, unit, {"x": X})
        bound.run()
        before = provider.stats()
        assert before["arena_bytes"] > 0
        for _ in range(20):
            bound.run()
        assert provider.stats() == before


def test_unload_gives_the_memory_back() -> None:
    provider = ready(CpuProvider())
    x = np.ones(1 << 20, np.float32)
    with graph_of(model("agraph (float[N] x) => (float[N] y) { a = Relu(x) b = Exp(a) y = Add(b, a) }")) as graph:
        unit = unit_of(graph)
        small, large = provider.compile(unit), provider.compile(unit)
        Bound(small, unit, {"x": x[:16]}).run()
        few = provider.stats()["arena_bytes"]
        Bound(large, unit, {"x": x}).run()
        assert provider.stats()["arena_bytes"] >= x.nbytes
        provider.unload(large)
        assert provider.stats()["arena_bytes"] <= max(few, 4096)
        assert Bound(small, unit, {"x": x[:16]}).run()[0].tolist() == pytest.approx([np.e + 1] * 16)
        provider.unload(small)
        assert provider.stats()["arena_bytes"] == 0


def test_unload_lets_constants_go_without_the_collector() -> None:
    proto = model(
        "agraph (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1.0, 2.0, 3.0, 4.0}, float[2] b = {5.0, 6.0}> "
        "{ a = MatMul(x, w) y = Add(a, b) }"
    )
    with compiled(proto, "all") as (_, program, unit):
        Bound(program, unit, {"x": np.ones((3, 2), np.float32)}).run()
        code = weakref.ref(program.code)
        gc.disable()  # loading a model turns it on
    try:
        del program
        assert code() is None
    finally:
        gc.enable()


def test_an_absurd_size_is_refused_before_it_is_touched() -> None:
    """1 TiB of interior value: refused by name, resident memory stays where it was."""
    proto = model("""agraph (float[1, 1] x) => (float[1, 1] y) <int64[2] s = {524288, 524288}, int64[1] a = {0}> {
        big = Expand(x, s)  more = Neg(big)  y = ReduceMax<keepdims = 1>(more) }""")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with compiled(proto) as (_, program, unit), pytest.raises(OutOfMemoryError) as caught:
        Bound(program, unit, {"x": np.ones((1, 1), np.float32)}).run()
    assert caught.value.asked == 1 << 40
    assert caught.value.value == "more"
    assert caught.value.available < 1 << 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_a_constant_of_absurd_size_is_refused() -> None:
    proto = model("""agraph (float[1] x) => (float[1] y) <int64[2] s = {524288, 524288}> {
        big = ConstantOfShape(s)  m = ReduceMax<keepdims = 0>(big)  y = Add(x, m) }""")
    with compiled(proto) as (_, program, unit), pytest.raises(OutOfMemoryError):
        Bound(program, unit, {"x": np.ones(1, np.float32)})


def test_constants_are_made_once_for_all_signatures() -> None:
    proto = model("""agraph (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> {
        a = Neg(w)  b = Exp(a)  y = Add(x, b) }""")
    with compiled(proto) as (_, program, unit):
        Bound(program, unit, {"x": np.ones((1, 2), np.float32)}).run()
        made = {op.step.op_type: results[0] for op, results in program.code.folded.items()}
        assert {"Neg", "Exp"} <= set(made)
        Bound(program, unit, {"x": np.ones((3, 2), np.float32)}).run()
        for op, results in program.code.folded.items():
            assert results[0] is made[op.step.op_type]


# --- properties -------------------------------------------------------------------------------------------------------

UNARY = ("Neg", "Relu", "Abs", "Identity", "Sigmoid", "Floor")
BINARY = ("Add", "Mul", "Sub", "Max")


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Square matrices through elementwise operators and views; several outputs, some of them read inside."""
    names = ["x0", "x1"]
    nodes = []
    for i in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(("unary", "binary", "transpose", "slice", "shift", "matmul")))
        pick = partial(draw, st.sampled_from(names))
        out = f"v{i}"
        if kind == "unary":
            nodes.append(helper.make_node(draw(st.sampled_from(UNARY)), [pick()], [out]))
        elif kind == "binary":
            nodes.append(helper.make_node(draw(st.sampled_from(BINARY)), [pick(), pick()], [out]))
        elif kind == "transpose":
            nodes.append(helper.make_node("Transpose", [pick()], [out], perm=[1, 0]))
        elif kind == "slice":  # reversed rows: a view with a negative stride
            nodes.append(helper.make_node("Slice", [pick(), "from", "to", "axes", "back"], [out]))
        elif kind == "shift":  # there and back through another shape
            nodes.append(helper.make_node("Reshape", [pick(), "flat"], [f"{out}_"]))
            nodes.append(helper.make_node("Reshape", [f"{out}_", "square"], [out]))
        else:
            nodes.append(helper.make_node("MatMul", [pick(), pick()], [out]))
        names.append(out)
    made = names[2:]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True))
    constants = {"from": [-1], "to": [-100], "axes": [0], "back": [-1], "flat": [16], "square": [4, 4]}
    info = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=[4, 4])
    graph = helper.make_graph(
        nodes, "random", [info("x0"), info("x1")], [info(name) for name in outputs],
        [helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class Poisoned(Walk):
    """Fills every block with rubbish as soon as the plan calls it free."""

    def free_if_dead(self, root: Root) -> None:
        if root.readers == 0:
            block = self.region.scratch.array(root.offset, np.dtype(np.uint8), (root.end - root.start,))
            self._records.append(Record(BOUND, self.code.ops[0], (), {}, (partial(block.fill, 0xFF),)))
        super().free_if_dead(root)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(graphs(), st.integers(0, 2**31))
def test_bound_equals_node_by_node_bit_for_bit(proto: onnx.ModelProto, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scratch = Scratch()
    with graph_of(proto) as graph:
        unit = unit_of(graph)
        code = Code((*unit.constant_nodes, *unit.nodes), unit.inputs, unit.outputs, unit.constants)
        for _ in range(2):
            inputs = [np.zeros((4, 4), np.float32) for _ in unit.inputs]
            places: dict[int, np.ndarray] = {}

            def place(i: int, dtype: str, shape: tuple[int, ...], places: dict[int, np.ndarray] = places) -> np.ndarray:
                assert i not in places
                places[i] = np.empty(shape, dtype)
                return places[i]

            items = dict(zip(code.top.formals, (Item(FIXED, x) for x in inputs), strict=True))
            binding = Poisoned(code, code.top, Region(scratch), items, place).bound()
            assert not binding.late
            for _ in range(2):
                fresh = [rng.standard_normal((4, 4)).astype(np.float32) for _ in inputs]
                for x, new in zip(inputs, fresh, strict=True):
                    x[...] = new
                binding.run({})
                expected = _node_by_node(unit, dict(zip((v.name for v in unit.inputs), fresh, strict=True)))
                for i, value in enumerate(unit.outputs):
                    assert places[i].tobytes() == expected[value.name].tobytes(), value.name
                for x, new in zip(inputs, fresh, strict=True):
                    np.testing.assert_array_equal(x, new)


def _node_by_node(unit: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Every node alone, on fresh arrays, in the frame's immediate mode."""
    for node in (*unit.constant_nodes, *unit.nodes):
        for step in node.steps():
            entry = find(step)
            read = [values[v.name] if v.name in values else unit.constants[v.name] for v in step.inputs]
            bind = Bind(step, [np.array(item) for item in read])
            entry.bind(bind, entry.parsed(step))
            values.update(zip((v.name for v in step.outputs), map(np.array, bind.results), strict=True))
    return values


# --- errors and odd kernels -------------------------------------------------------------------------------------------


def _explode(out: np.ndarray) -> None:
    raise ArithmeticError("out of luck")


@kernel("Explode", domain="test.program")
def explode(b: Bind, _: None) -> None:
    """Fails in the run."""
    b.step(_explode, b.out(0, b.array(0).shape, b.array(0).dtype))


@kernel("ChangesItsMind", domain="test.program")
def changes_its_mind(b: Bind, _: None) -> None:
    """Asks for an output before it finds out that it is dynamic."""
    x = b.array(0)
    out = b.out(0, x.shape, x.dtype)
    b.step(np.negative, b.contiguous(x), out)
    b.dynamic()


@kernel("Forgets", domain="test.program")
def forgets(b: Bind, _: None) -> None:
    """Makes no output."""


def _custom(op: str, before: str = "Relu") -> onnx.ModelProto:
    return model(
        f"agraph (float[4, 6] x) => (float[4, 6] y) {{ [relu] a = {before}(x) [bad] y = test.program.{op}(a) }}",
        **{"test.program": 1},
    )


@pytest.mark.parametrize("before", ["Relu", "test.program.ChangesItsMind"])  # bound, unbound
def test_kernel_error_tells_the_story_and_the_next_run_works(before: str) -> None:
    with compiled(_custom("Explode", before)) as (_, program, unit):
        bound = Bound(program, unit, {"x": X})
        for _ in range(2):
            with pytest.raises(KernelError) as caught:
                bound.run()
        error = caught.value
        assert (error.node, error.op, error.opset) == ("bad", "test.program::Explode", 1)
        assert error.inputs == [{"name": "a", "dtype": "float32", "shape": [4, 6]}]
        assert error.cause == "ArithmeticError: out of luck"
        assert "_explode" in error.remote_traceback
        assert "bad" in str(error)
        assert "float32[4, 6]" in str(error)


def test_error_while_binding_names_the_node() -> None:
    proto = model("agraph (float[N] x, float[M] z) => (float[N] y) { a = Neg(x) [add] y = Add(a, z) }")
    with compiled(proto) as (_, program, unit):
        with pytest.raises(KernelError) as caught:
            Bound(program, unit, {"x": np.ones(3, np.float32), "z": np.ones(2, np.float32)})
        assert caught.value.node == "add"
        assert [(one["name"], one["shape"]) for one in caught.value.inputs] == [("a", [3]), ("z", [2])]
        good = {"x": np.ones(3, np.float32), "z": np.ones(3, np.float32)}
        assert Bound(program, unit, good).run()[0].tolist() == [0, 0, 0]


def test_kernel_that_turns_dynamic_after_asking_for_a_place() -> None:
    with compiled(_custom("ChangesItsMind")) as (provider, program, unit):
        bound = Bound(program, unit, {"x": X})
        np.testing.assert_array_equal(bound.run()[0], -np.maximum(X, 0))
        assert not bound.places
        assert provider.stats()["unbound_nodes"] == 1


def test_kernel_without_output_is_an_error() -> None:
    with compiled(_custom("Forgets")) as (_, program, unit), pytest.raises(KernelError, match="made no output 0"):
        Bound(program, unit, {"x": X})


def test_unit_that_reads_the_undefined_is_refused() -> None:
    provider = ready(CpuProvider())
    with graph_of(model("agraph (float[2] x) => (float[2] y) { a = Neg(x) y = Relu(a) }")) as graph:
        unit = unit_of(graph)
        broken = type(unit)(unit.nodes[1:], unit.inputs, unit.outputs, unit.constants)
        with pytest.raises(ClaimBrokenError, match="'a'"):
            provider.compile(broken)


def test_options_are_refused() -> None:
    with pytest.raises(ProviderUnavailableError, match="no option speed"):
        CpuProvider().setup(Context({"speed": 1}, 0, 1, logging.getLogger()))
    with pytest.raises(ProviderUnavailableError, match="reshape is 1; write True or False"):
        CpuProvider().setup(Context({"reshape": 1}, 0, 1, logging.getLogger()))
