"""If, Loop, Scan and SequenceMap inside the cpu provider, against onnxruntime and, where it fails, worked examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from outrider.providers.contract import Decline, KernelError
from tests.program_harness import Bound, check_model, compiled, model, offers, run_cpu

pytestmark = pytest.mark.fast

F32, I64 = np.float32, np.int64
TRUE, FALSE = np.array(True), np.array(False)


# --- If ---------------------------------------------------------------------------------------------------------------

IF_SHAPES = """agraph (bool c) => (float[N] y) {
    y = If (c) <then_branch = t () => (float[2] a) { a = Constant<value = float[2] {1, 2}>() },
                else_branch = e () => (float[3] b) { b = Constant<value = float[3] {3, 4, 5}>() }> }"""

# Captures through two levels: top at the innermost, mid of the level between.
IF_NESTED = """agraph (bool c, bool d, float[1] top) => (float[1] y) {
    y = If (c) <
        then_branch = t () => (float[1] r) {
            mid = Mul(top, top)
            r = If (d) <then_branch = tt () => (float[1] a) { a = Add(top, mid) },
                        else_branch = te () => (float[1] b) { b = Sub(top, mid) }> },
        else_branch = e () => (float[1] s) { s = Identity(top) }> }"""


@pytest.mark.parametrize("condition", [TRUE, FALSE, np.array([True])])
def test_if_whose_branches_have_different_shapes(condition: np.ndarray) -> None:
    expected = [1, 2] if condition else [3, 4, 5]
    check_model(model(IF_SHAPES.replace("bool c", f"bool{list(condition.shape) or ''} c")), {"c": condition},
                [np.array(expected, F32)])  # fmt: skip


@pytest.mark.parametrize(("outer", "inner", "expected"), [(True, True, 12), (True, False, -6), (False, True, 3)])
def test_nested_if_captures_through_both_levels(outer: bool, inner: bool, expected: float) -> None:
    feeds = {"c": np.array(outer), "d": np.array(inner), "top": np.array([3], F32)}
    check_model(model(IF_NESTED), feeds)
    assert run_cpu(model(IF_NESTED), feeds)[0].tolist() == [expected]


def test_a_condition_that_flips_is_honoured_by_the_same_binding() -> None:
    with compiled(model(IF_NESTED)) as (_, program, unit):
        feeds: dict[str, Any] = {"c": TRUE, "d": TRUE, "top": np.array([3], F32)}
        bound = Bound(program, unit, feeds)
        got = []
        for outer, inner, top in [(1, 1, 3), (1, 0, 3), (0, 0, 3), (1, 1, 2), (1, 0, 2)]:
            got.append(bound.run({"c": bool(outer), "d": bool(inner), "top": top})[0].item())
        assert got == [12, -6, 3, 6, -2]


BRANCHES = """agraph (bool c, float[N] x, float[N] z) => (float[N] y, float[N] v) {
    w = Exp(x)
    a, b = If (c) <then_branch = t () => (float[N] p, float[N] q) { q = Relu(w)  p = Mul(q, z) },
                   else_branch = e () => (float[N] r, float[N] s) { r = Abs(z)  s = Identity(z) }>
    y = Neg(a) v = Add(b, w) }"""


def test_branches_of_the_same_shapes_are_a_bound_step() -> None:
    x, z = np.linspace(-1, 1, 6, dtype=F32), np.linspace(2, -2, 6, dtype=F32)
    with compiled(model(BRANCHES)) as (provider, program, unit):
        bound = Bound(program, unit, {"c": np.array(True), "x": x, "z": z})
        for c in (True, False, False, True):
            y, v = bound.run({"c": np.array(c), "x": x, "z": z})
            np.testing.assert_allclose(y, -np.exp(x) * z if c else -np.abs(z), rtol=1e-6)
            np.testing.assert_allclose(v, np.exp(x) * 2 if c else z + np.exp(x), rtol=1e-6)
        assert provider.stats()["unbound_nodes"] == 0
        assert sorted(bound.places) == [0, 1]
        assert sum(provider.stats()["steps"].values()) >= 7  # those of both branches, too
        small = Bound(program, unit, {"c": np.array(True), "x": x[:2], "z": z[:2]})
        np.testing.assert_allclose(small.run()[0], -np.exp(x[:2]) * z[:2], rtol=1e-6)


@pytest.mark.parametrize(
    "branch", ["r = NonZero(z) s = Cast<to=1>(r)", "q = Abs(z) r = Concat<axis=0>(q, q) s = Neg(r)"]
)
def test_branches_whose_shapes_differ_or_depend_on_data_are_not(branch: str) -> None:
    proto = model(
        """agraph (bool c, float[N] z) => (float[M] y) {
        y = If (c) <then_branch = t () => (float[K] p) { p = Relu(z) },
                    else_branch = e () => (float[L] s) { BRANCH }> }""".replace("BRANCH", branch)
    )
    z = np.array([0, 2, -3], F32)
    with compiled(proto) as (provider, program, unit):
        bound = Bound(program, unit, {"c": np.array(True), "z": z})
        assert bound.run()[0].tolist() == [0, 2, 0]
        assert bound.run({"c": np.array(False), "z": z})[0].size in (2, 6)
        assert provider.stats()["unbound_nodes"] == 1


def test_a_branch_that_does_not_take_its_inputs_fails_when_it_is_chosen() -> None:
    proto = model("""agraph (bool c, float[N] z) => (float[M] y) <int64[2] two = {2, 2}> {
        y = If (c) <then_branch = t () => (float[K] p) { p = Relu(z) },
                    else_branch = e () => (float[L] s) { r = Reshape(z, two) s = Neg(r) }> }""")
    with compiled(proto) as (provider, program, unit):
        bound = Bound(program, unit, {"c": np.array(True), "z": np.ones(3, F32)})
        assert bound.run()[0].tolist() == [1, 1, 1]
        assert provider.stats()["unbound_nodes"] == 0
        with pytest.raises(KernelError, match="Reshape"):
            bound.run({"c": np.array(False), "z": np.ones(3, F32)})
        assert bound.run({"c": np.array(True), "z": np.ones(3, F32)})[0].tolist() == [1, 1, 1]


def test_a_known_condition_leaves_a_straight_line() -> None:
    """The rank of the input decides: nothing is left for the run, the output is written to its place."""
    proto = model("""agraph (float[N, M] x) => (float[N, M] y, float[N, M] z) <int64 two = {2}> {
        s = Shape(x)  r = Size(s)  c = Equal(r, two)
        a, z = If (c) <then_branch = t () => (float[N, M] p, float[N, M] q) { q = Relu(x)  p = Neg(q) },
                       else_branch = e () => (float[N, M] b, float[N, M] d) { b = Abs(x)  d = Identity(x) }>
        y = Neg(a) }""")
    x = np.linspace(-1, 1, 6, dtype=F32).reshape(2, 3)
    with compiled(proto) as (provider, program, unit):
        bound = Bound(program, unit, {"x": x})
        y, z = bound.run()
        np.testing.assert_array_equal(y, np.maximum(x, 0))
        np.testing.assert_array_equal(z, np.maximum(x, 0))
        assert provider.stats()["unbound_nodes"] == 0
        assert sorted(bound.places) == [0, 1]


def test_known_condition_around_a_size_known_in_the_run() -> None:
    proto = model("""agraph (float[N] x) => (int64[1, K] y, float[N] z) <bool c = {1}> {
        a, z = If (c) <then_branch = t () => (int64[1, K] p, float[N] q) { p = NonZero(x)  q = Neg(x) },
                       else_branch = e () => (int64[1, K] v, float[N] w) { v = NonZero(x)  w = Abs(x) }>
        y = Neg(a) }""")
    check_model(proto, {"x": np.array([0, 2, 0, 3], F32)})


def test_if_that_returns_and_captures_sequences() -> None:
    proto = model("""agraph (bool c, float[2] x) => (seq(float[2]) y, int64 n) {
        s = SequenceConstruct(x, x)
        y = If (c) <then_branch = t () => (seq(float[2]) a) { a = SequenceInsert(s, x) },
                    else_branch = e () => (seq(float[2]) b) { b = SequenceConstruct(x) }>
        n = SequenceLength(y) }""")
    for condition, length in ((TRUE, 3), (FALSE, 1)):
        got = check_model(proto, {"c": condition, "x": np.array([1, 2], F32)})
        assert len(got[0]) == length


def test_if_condition_of_two_elements_is_an_error_that_names_the_node() -> None:
    proto = model(IF_SHAPES.replace("bool c", "bool[N] c").replace("y = If", "[choose] y = If"))
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"c": np.array([True, False])})
        with pytest.raises(KernelError, match="one number") as caught:
            bound.run()
    assert caught.value.node == "choose"


def test_an_error_in_a_body_names_the_body_node() -> None:
    proto = model("""agraph (bool c, int64[1] i, float[2] x) => (float[1] y) {
        [choose] y = If (c) <then_branch = t () => (float[1] a) { [pick] a = Gather(x, i) },
                             else_branch = e () => (float[1] b) { b = Gather(x, i) }> }""")
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"c": TRUE, "i": np.array([5]), "x": np.ones(2, F32)})
        with pytest.raises(KernelError) as caught:
            bound.run()
        assert caught.value.node == "choose/then/pick"
        assert bound.run({"c": TRUE, "i": np.array([1]), "x": np.array([3, 4], F32)})[0].tolist() == [4]


# --- Loop -------------------------------------------------------------------------------------------------------------


def loop(body_condition: str = "co = Identity(ci)", trips: str = "m", condition: str = "") -> onnx.ModelProto:
    """Carried v grows by 1 each time and is the scan output as well."""
    return model(f"""agraph (int64 m, bool c, float[1] v) => (float[1] last, float[N, 1] all)
        <float one = {{1}}, int64 two = {{2}}> {{
        last, all = Loop ({trips}, {condition}, v) <body = b (int64 i, bool ci, float[1] vi)
            => (bool co, float[1] vo, float[1] so) {{ vo = Add(vi, one)  so = Identity(vo)  {body_condition} }}> }}""")


LOOPS = {
    "three trips, no condition": (loop(), 3, True, 0),
    "three trips, condition": (loop(condition="c"), 3, True, 0),
    "the body stops": (loop("co = Less(i, i)", condition="c"), 3, True, 0),
    "the body stops, no condition given": (loop("co = Less(i, i)"), 3, True, 0),
    "no trip count": (loop("co = Less(i, two)", trips="", condition="c"), 0, True, 0),
    "neither": (loop("co = Less(i, two)", trips=""), 0, True, 0),
    "zero trips": (loop(), 0, True, 7),
    "negative trips": (loop(), -5, True, 7),
    "condition false": (loop(condition="c"), 3, False, 7),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    proto, trips, condition, start = LOOPS[name]
    check_model(proto, {"m": np.array(trips), "c": np.array(condition), "v": np.array([start], F32)})


@pytest.mark.parametrize("declared", ["float[?, 4]", "float[]"])
def test_loop_without_a_trip_whose_scan_has_a_shape_that_depends_on_data(declared: str) -> None:
    """Its rank is what the body declares; with none declared the result is [0], as in onnxruntime."""
    proto = model("""agraph (int64 m, float[N] x, int64[R] shape) => (float[] y) {
        y = Loop (m, ) <body = b (int64 i, bool ci) => (bool co, float[] so) {
            co = Identity(ci)  so = Reshape(x, shape) }> }""")
    proto.graph.node[0].input[:] = ["m", ""]
    kind = proto.graph.node[0].attribute[0].g.output[1].type.tensor_type
    kind.ClearField("shape")
    if declared == "float[?, 4]":
        kind.shape.dim.add()
        kind.shape.dim.add(dim_value=4)
    for trips in (0, 2):
        check_model(proto, {"m": np.array(trips), "x": np.ones(8, F32), "shape": np.array([2, 4])})


def test_loop_of_nothing_but_a_trip_count() -> None:
    proto = loop()
    del proto.graph.node[0].input[2:]
    node = proto.graph.node[0]
    body = node.attribute[0].g
    del node.output[0], body.input[2:], body.output[1:2], proto.graph.output[:1]
    body.node[0].input[0] = "v"
    assert list(node.input) == ["m", ""]
    check_model(proto, {"m": np.array(3), "c": TRUE, "v": np.ones(1, F32)})


def test_loop_of_known_trips_is_one_binding_of_its_body() -> None:
    with compiled(loop()) as (_, program, unit):
        bound = Bound(program, unit, {"m": np.array(50), "c": TRUE, "v": np.zeros(1, F32)})
        last, scans = bound.run()
        assert last.tolist() == [50]
        assert scans[:, 0].tolist() == list(range(1, 51))
        high = program.high
        assert bound.run({"m": 3, "c": True, "v": 5})[1].tolist() == [[6], [7], [8]]
        assert program.high == high


@pytest.mark.parametrize("trips", [3, 40])  # 40 shapes are more than are kept
def test_loop_whose_carried_value_grows(trips: int) -> None:
    proto = model("""agraph (int64 m, float[N] v) => (float[M] y) {
        y = Loop (m, , v) <body = b (int64 i, bool ci, float[K] vi) => (bool co, float[L] vo)
            <float[1] one = {1}> { co = Identity(ci)  t = Neg(vi)  u = Neg(t)  vo = Concat<axis = 0>(u, one) }> }""")
    check_model(proto, {"m": np.array(trips), "v": np.array([5, 6], F32)})


def test_loop_that_carries_a_sequence_and_captures() -> None:
    proto = model("""agraph (int64 m, float[1] x) => (float[N] y, int64 n) {
        s = SequenceEmpty<dtype = 1>()  w = Neg(x)
        t = Loop (m, , s) <body = b (int64 i, bool ci, seq(float[1]) si) => (bool co, seq(float[1]) so)
            { co = Identity(ci)  f = Cast<to = 1>(i)  e = Add(w, f)  so = SequenceInsert(si, e) }>
        y = ConcatFromSequence<axis = 0>(t)  n = SequenceLength(t) }""")
    got = check_model(proto, {"m": np.array(3), "x": np.array([-5], F32)})
    assert got[0].tolist() == [5, 6, 7]


def test_loop_in_a_loop_with_an_if_inside() -> None:
    proto = model("""agraph (int64 m, float[1] x) => (float[1] y) <int64 one = {1}> {
        y = Loop (m, , x) <body = outer (int64 i, bool ci, float[1] a) => (bool co, float[1] b) {
            co = Identity(ci)
            b = Loop (m, , a) <body = inner (int64 j, bool cj, float[1] p) => (bool cp, float[1] q) {
                cp = Identity(cj)  s = Less(i, one)
                q = If (s) <then_branch = t () => (float[1] u) { u = Add(p, x) },
                            else_branch = e () => (float[1] v) { v = Sub(p, a) }> }> }> }""")
    check_model(proto, {"m": np.array(3), "x": np.array([2], F32)})


def test_loop_scan_of_changing_shape_is_an_error() -> None:
    proto = model("""agraph (int64 m, float[N] v) => (float[A] y, float[B, C] z) {
        y, z = Loop (m, , v) <body = b (int64 i, bool ci, float[K] vi) => (bool co, float[L] vo, float[J] zo)
            { co = Identity(ci)  vo = Concat<axis = 0>(vi, vi)  zo = Neg(vo) }> }""")
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"m": np.array(3), "v": np.ones(1, F32)})
        with pytest.raises(KernelError, match=r"scan output 0 was float32\[2\] at first and is float32\[4\]"):
            bound.run()


def test_results_of_an_iteration_survive_the_next() -> None:
    """Scan outputs that are the body's inputs, captures and constants."""
    proto = model("""agraph (int64 m, float[2] v) => (float[2] y, float[A, 2] p, float[B, 2] q, float[C, 2] r) {
        w = Neg(v)
        y, p, q, r = Loop (m, , v) <body = b (int64 i, bool ci, float[2] vi)
            => (bool co, float[2] vo, float[2] vi2, float[2] wo, float[2] k)
            { co = Identity(ci)  vo = Add(vi, w)  vi2 = Identity(vi)  wo = Identity(w)
              k = Constant<value = float[2] {8, 9}>() }> }""")
    check_model(proto, {"m": np.array(3), "v": np.array([1, -2], F32)})


# --- Scan -------------------------------------------------------------------------------------------------------------


def scan(attributes: str = "", width: int = 2) -> onnx.ModelProto:
    """Running sums: the state is added to, and is the scan output."""
    return model(f"""agraph (float[{width}] s, float[A, B] x) => (float[{width}] final, float[C, D] all) {{
        final, all = Scan (s, x) <num_scan_inputs = 1 {attributes}, body = b (float[{width}] si, float[{width}] xi)
            => (float[{width}] so, float[{width}] yo) {{ so = Add(si, xi)  yo = Identity(so) }}> }}""")


SCANS = {
    "forward": scan(),
    "backward": scan(", scan_input_directions = [1]"),
    "output backward": scan(", scan_output_directions = [1]"),
    "input axis": scan(", scan_input_axes = [1]", 3),
    "input axis from the end": scan(", scan_input_axes = [-1]", 3),
    "output axis": scan(", scan_output_axes = [1]"),
    "output axis from the end": scan(", scan_output_axes = [-1]"),
    "output axis, backward": scan(", scan_output_axes = [1], scan_output_directions = [1]"),
}


@pytest.mark.parametrize("name", SCANS)
def test_scan(name: str) -> None:
    width = 3 if "input axis" in name else 2
    check_model(SCANS[name], {"s": np.zeros(width, F32), "x": np.array([[1, 2], [3, 4], [5, 6]], F32)})


@pytest.mark.parametrize(("attributes", "shape"), [("", (0, 2)), (", scan_output_axes = [1]", (2, 0))])
def test_scan_over_nothing(attributes: str, shape: tuple[int, ...]) -> None:
    """onnxruntime fails on it."""
    feeds = {"s": np.array([9, 9], F32), "x": np.empty((0, 2), F32)}
    check_model(scan(attributes), feeds, [np.array([9, 9], F32), np.empty(shape, F32)])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [(", scan_input_axes = [2]", "scan_input_axes"), (", scan_output_directions = [2]", "must be 0")],
)
def test_scan_with_wrong_attributes(attributes: str, message: str) -> None:
    with compiled(_unchecked_scan(attributes)) as (_, program, unit):
        bound = Bound(program, unit, {"s": np.zeros(2, F32), "x": np.ones((3, 2), F32)})
        with pytest.raises(KernelError, match=message):
            bound.run()


def _unchecked_scan(attributes: str) -> onnx.ModelProto:
    """Of unknown rank, so that inference does not refuse the axis first."""
    return model(f"""agraph (float[2] s, float x) => (float[2] final, float all) {{
        t = Identity(x)
        final, all = Scan (s, t) <num_scan_inputs = 1 {attributes}, body = b (float[2] si, float[2] xi)
            => (float[2] so, float[2] yo) {{ so = Add(si, xi)  yo = Identity(so) }}> }}""")


def test_scan_before_opset_9_has_a_batch_axis() -> None:
    proto = model(
        """agraph (int64[2] lengths, float[2, 2] s, float[2, 3, 2] x) => (float[2, 2] final, float[2, 3, 2] all) {
        final, all = Scan (lengths, s, x) <num_scan_inputs = 1, directions = [1], body = b (float[2] si, float[2] xi)
            => (float[2] so, float[2] yo) { so = Add(si, xi)  yo = Identity(so) }> }""",
        opset=8,
    )
    x = np.arange(12, dtype=F32).reshape(2, 3, 2)
    check_model(proto, {"lengths": np.array([3, 2]), "s": np.ones((2, 2), F32), "x": x})


def test_scan_of_two_inputs_of_different_lengths() -> None:
    proto = model("""agraph (float[A] x, float[B] y) => (float[C] z) {
        z = Scan (x, y) <num_scan_inputs = 2, body = b (float p, float q) => (float r) { r = Add(p, q) }> }""")
    check_model(proto, {"x": np.ones(3, F32), "y": np.arange(3, dtype=F32)})
    with compiled(proto) as (_, program, unit):
        bound = Bound(program, unit, {"x": np.ones(3, F32), "y": np.ones(2, F32)})
        with pytest.raises(KernelError, match=r"different lengths, \[3, 2\]"):
            bound.run()


# --- SequenceMap, claims ----------------------------------------------------------------------------------------------


def test_sequence_map_with_a_second_sequence_and_a_tensor() -> None:
    proto = model("""agraph (seq(float[N]) s, seq(float[N]) t, float[1] k) => (seq(float[N]) y) {
        y = SequenceMap (s, t, k) <body = b (float[N] a, float[N] c, float[1] d) => (float[N] r)
            { e = Add(a, c)  r = Mul(e, d) }> }""")
    s = [np.array([1, 2], F32), np.array([3], F32)]
    t = [np.array([1, 1], F32), np.array([5], F32)]
    check_model(proto, {"s": s, "t": t, "k": np.array([2], F32)}, [[np.array([4, 6], F32), np.array([16], F32)]])


def test_a_body_that_nobody_serves_declines_the_node_with_its_reason() -> None:
    proto = model(
        """agraph (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] a) { [odd] a = nobody.Does(x) },
                    else_branch = e () => (float[2] b) { b = Neg(x) }> }""",
        nobody=1,
    )
    (answer,) = offers(proto)
    assert isinstance(answer, Decline)
    assert "then/odd" in answer.reason
    assert "no kernel for nobody::Does" in answer.reason
