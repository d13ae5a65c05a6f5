"""Fusion of ops at level `all`: each pattern in its spellings, what must not be fused, what fused ops are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from outrider.providers.contract import Decline, KernelError
from tests.kernel_harness import same
from tests.oracle import run_ort
from tests.program_harness import Bound, compiled, model, offers

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(5)
WEIGHTS: dict[str, np.ndarray] = {
    "w": RNG.normal(0, 0.3, (4, 3, 3, 3)),  # Conv of 3 channels to 4
    "w1": RNG.normal(0, 0.5, (4, 4, 1, 1)),
    "wt": RNG.normal(0, 0.3, (4, 6, 2, 2)), "wtg": RNG.normal(0, 0.3, (4, 3, 3, 3)),  # transposed, of 4 to 6
    "c61": RNG.normal(0, 1, (6, 1, 1)),
    "w4": RNG.normal(0, 0.3, (6, 4, 3, 3)), "wg": RNG.normal(0, 0.3, (6, 2, 3, 3)),  # of 4, in two groups
    "dw": RNG.normal(0, 0.5, (4, 1, 3, 3)),  # depthwise
    "m": RNG.normal(0, 0.4, (8, 6)),  # MatMul of 8 to 6
    "mt": RNG.normal(0, 0.4, (6, 8)),
    "b4": RNG.normal(0, 1, 4), "c4": RNG.normal(0, 1, (1, 4, 1, 1)), "d4": RNG.normal(0, 1, (4, 1, 1)),
    "b6": RNG.normal(0, 1, 6), "c6": RNG.normal(0, 1, (1, 6)), "b8": RNG.normal(0, 1, 8), "g8": RNG.normal(1, 0.2, 8),
    "scale": RNG.normal(1, 0.2, 4), "mean": RNG.normal(0, 1, 4), "var": RNG.uniform(0.5, 2, 4),
    "half": 0.5, "one": 1, "two": 2, "three": 3, "six": 6, "zero": 0, "sixth": 1 / 6, "neg": -1.5, "eps": 1e-5,
    "root2": np.sqrt(2), "rroot2": np.sqrt(0.5), "cubic": 0.044715, "rpi": np.sqrt(2 / np.pi), "alpha": 1.702,
    "mhalf": -0.5, "holes": np.array([1.5, 0, -2, 1]).reshape(4, 1, 1),
}  # fmt: skip
INTEGERS = {"last": [-1], "axis2": [2], "rows": list(range(5)), "flat": [0, -1], "back": [-1, 8], "both": [4, 6]}

IMAGE = "agraph (float[N, 3, H, W] x) => (float[N, 4, P, Q] y)"
SMALL = "agraph (float[N, 4, H, W] x) => (float[N, 4, H, W] y)"
ROWS = "agraph (float[N, M, 8] x) => (float[N, M, K] y)"
LIKE = "agraph (float[N, M, 8] x) => (float[N, M, 8] y)"
BEHIND = SMALL.replace("float[N, 4, H, W] y", "float[N, K, P, Q] y")
FEEDS = {
    IMAGE: {"x": RNG.normal(0, 2, (2, 3, 6, 5)).astype(np.float32)},
    SMALL: {"x": RNG.normal(0, 3, (2, 4, 5, 3)).astype(np.float32)},
    ROWS: {"x": RNG.normal(0, 2, (2, 3, 8)).astype(np.float32)},
    LIKE: {"x": RNG.normal(0, 3, (2, 3, 8)).astype(np.float32)},
}


def weighted(text: str, extra: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """The model of the text with every constant of WEIGHTS and INTEGERS that it names."""
    proto = model(text, opset=21)
    bodies = [attribute.g for node in proto.graph.node for attribute in node.attribute if attribute.HasField("g")]
    nodes = [node for graph in (proto.graph, *bodies) for node in graph.node]
    used = {name for node in nodes for name in node.input}
    made = {name for node in nodes for name in node.output}
    floats = {name: np.asarray(value, np.float32) for name, value in WEIGHTS.items()}
    given = {**floats, **{name: np.array(value, np.int64) for name, value in INTEGERS.items()}, **(extra or {})}
    there = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    names = used - made - there - {""}
    proto.graph.initializer.extend(numpy_helper.from_array(given[name], name) for name in sorted(names))
    return proto


def check_fused(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray], fused: Mapping[str, int] | None = None) -> Any:
    """Both implementations agree with onnxruntime, and the patterns made so many ops. Returns the ops that are left."""
    expected = list(run_ort(proto.SerializeToString(), feeds).values())
    left: list[str] = []
    for library in (False, True):
        with compiled(proto, "all", compiled=library) as (provider, program, unit):
            for got, wanted in zip(Bound(program, unit, feeds).run(), expected, strict=True):
                largest = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
                same(got, wanted, 1e-4, 2e-6 * (1 + largest))
            if fused is not None:
                assert dict(program.fused) == fused == provider.stats()["fused"]
            left = [op.step.op_type for op in program.code.top.ops]
    return left


# --- patterns ---------------------------------------------------------------------------------------------------------

HARD_SWISH = {
    "clip, then / 6": "a = Add(x, three)  c = Clip(a, zero, six)  p = Mul(x, c)  y = Div(p, six)",
    "3 + x": "a = Add(three, x)  c = Clip(a, zero, six)  p = Mul(c, x)  y = Mul(p, sixth)",
    "gate / 6": "a = Add(x, three)  c = Clip(a, zero, six)  g = Div(c, six)  y = Mul(x, g)",
    "x / 6": "a = Add(x, three)  c = Clip(a, zero, six)  g = Mul(x, sixth)  y = Mul(g, c)",
    "inside the clip": "a = Mul(x, sixth)  s = Add(a, half)  c = Clip(s, zero, one)  y = Mul(x, c)",
    "hard sigmoid": "g = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x)  y = Mul(g, x)",
}
GELU = {
    "halves the product": "a = Div(x, root2)  e = Erf(a)  o = Add(e, one)  p = Mul(x, o)  y = Mul(p, half)",
    "halves x": "h = Mul(x, half)  a = Mul(x, rroot2)  e = Erf(a)  o = Add(one, e)  y = Mul(h, o)",
    "halves the gate": "a = Mul(rroot2, x)  e = Erf(a)  o = Add(e, one)  g = Mul(half, o)  y = Mul(x, g)",
    "half + half erf": "a = Div(x, root2)  e = Erf(a)  h = Mul(e, half)  o = Add(h, half)  y = Mul(o, x)",
    "tanh of a cube": """c = Pow(x, three)  k = Mul(c, cubic)  s = Add(x, k)  a = Mul(s, rpi)  t = Tanh(a)
        o = Add(t, one)  p = Mul(x, o)  y = Mul(p, half)""",
    "tanh by products": """k = Mul(cubic, x)  q = Mul(x, k)  c = Mul(x, q)  s = Add(x, c)  a = Mul(rpi, s)  t = Tanh(a)
        o = Add(one, t)  g = Mul(half, o)  y = Mul(x, g)""",
    "tanh of x (1 + x x)": """q = Mul(x, x)  k = Mul(q, cubic)  o1 = Add(k, one)  s = Mul(x, o1)  a = Mul(s, rpi)
        t = Tanh(a)  o = Add(one, t)  h = Mul(x, half)  y = Mul(h, o)""",
}
SWISH = {
    "sigmoid": "s = Sigmoid(x)  y = Mul(x, s)",
    "scaled": "a = Mul(x, alpha)  s = Sigmoid(a)  y = Mul(s, x)",
}


@pytest.mark.parametrize("spelling", HARD_SWISH)
def test_hard_swish(spelling: str) -> None:
    proto = weighted(f"{LIKE} {{ {HARD_SWISH[spelling]} }}")
    assert check_fused(proto, {"x": np.linspace(-5, 5, 48, dtype=np.float32).reshape(2, 3, 8)}) == ["HardSwish"]


@pytest.mark.parametrize("spelling", GELU)
def test_gelu(spelling: str) -> None:
    assert check_fused(weighted(f"{LIKE} {{ {GELU[spelling]} }}"), FEEDS[LIKE], {"gelu": 1}) == ["Gelu"]


@pytest.mark.parametrize("spelling", SWISH)
def test_swish(spelling: str) -> None:
    assert check_fused(weighted(f"{LIKE} {{ {SWISH[spelling]} }}"), FEEDS[LIKE], {"swish": 1}) == ["Swish"]


def test_hard_sigmoid_and_mish() -> None:
    left = check_fused(
        weighted(f"{LIKE} {{ a = Add(x, three)  c = Clip(a, zero, six)  y = Div(c, six) }}"), FEEDS[LIKE]
    )
    assert left == ["HardSigmoid"]
    left = check_fused(weighted(f"{LIKE} {{ s = Softplus(x)  t = Tanh(s)  y = Mul(x, t) }}"), FEEDS[LIKE], {"mish": 1})
    assert left == ["Mish"]


NEARLY = {
    "another root": "a = Div(x, three)  e = Erf(a)  o = Add(e, one)  p = Mul(x, o)  y = Mul(p, half)",
    "another slope": "a = Add(x, two)  c = Clip(a, zero, six)  p = Mul(x, c)  y = Div(p, six)",
    "another limit": "a = Add(x, three)  c = Clip(a, zero, three)  p = Mul(x, c)  y = Div(p, six)",
    "another factor": "s = Tanh(x)  o = Add(s, two)  p = Mul(x, o)  y = Mul(p, half)",
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_an_activation_stays_what_it_is(name: str) -> None:
    assert check_fused(weighted(f"{LIKE} {{ {NEARLY[name]} }}"), FEEDS[LIKE], {"chain": 1}) == ["Chain"]


def test_a_constant_with_more_axes_stays_an_operand() -> None:
    """It gives its axes to the result."""
    text = "a = Add(x, three)  c = Clip(a, zero, six)  p = Mul(x, c)  y = Div(p, wide)"
    extra = {"wide": np.full((1, 1, 1, 1), 6, np.float32)}
    proto = weighted(f"{LIKE.replace('float[N, M, 8] y', 'float[A, N, M, 8] y')} {{ {text} }}", extra)
    assert check_fused(proto, FEEDS[LIKE], {"chain": 1}) == ["Chain", "Div"]
    norm = f"u = ReduceMean(x, last)  {NORM.replace('eps', 'tiny')}  n = Div(d, s)  y = Mul(n, g8)"
    tiny = {"tiny": np.full((1, 1, 1, 1), 1e-5, np.float32)}
    proto = weighted(f"{LIKE.replace('float[N, M, 8] y', 'float[A, N, M, 8] y')} {{ {norm} }}", tiny)
    assert "LayerNormalization" not in check_fused(proto, FEEDS[LIKE])


NORM = "d = Sub(x, u)  q = Pow(d, two)  v = ReduceMean(q, last)  e = Add(v, eps)  s = Sqrt(e)"
LAYER_NORM = {
    "paddle": f"u = ReduceMean(x, last)  {NORM}  n = Div(d, s)  k = Mul(n, g8)  y = Add(k, b8)",
    "products": """u = ReduceMean(x, axis2)  d = Sub(x, u)  q = Mul(d, d)  v = ReduceMean(q, axis2)  e = Add(eps, v)
        s = Sqrt(e)  r = Reciprocal(s)  n = Mul(r, d)  k = Mul(g8, n)  y = Add(b8, k)""",
    "centred twice": """u = ReduceMean(x, last)  d = Sub(x, u)  d2 = Sub(x, u)  q = Pow(d2, two)
        v = ReduceMean(q, last)  e = Add(v, eps)  s = Sqrt(e)  n = Div(d, s)  k = Mul(n, g8)  y = Add(k, b8)""",
    "power of -1/2": """u = ReduceMean(x, last)  d = Sub(x, u)  q = Pow(d, two)  v = ReduceMean(q, last)
        e = Add(v, eps)  r = Pow(e, mhalf)  n = Mul(d, r)  k = Mul(n, g8)  y = Add(k, b8)""",
    "no bias": f"u = ReduceMean(x, last)  {NORM}  n = Div(d, s)  y = Mul(n, g8)",
    "no scale": f"u = ReduceMean(x, last)  {NORM}  y = Div(d, s)",
}


@pytest.mark.parametrize("spelling", LAYER_NORM)
def test_layer_normalization(spelling: str) -> None:
    proto = weighted(f"{LIKE} {{ {LAYER_NORM[spelling]} }}")
    assert check_fused(proto, FEEDS[LIKE], {"LayerNormalization": 1}) == ["LayerNormalization"]


def test_instance_normalization() -> None:
    proto = weighted(
        f"agraph (float[N, 3, T] x) => (float[N, 3, T] y) {{ u = ReduceMean(x, last)  {NORM} y = Div(d, s) }}"
    )
    left = check_fused(proto, FEEDS[LIKE], {"InstanceNormalization": 1})
    assert left == ["InstanceNormalization"]


def test_rms_normalization() -> None:
    text = "q = Mul(x, x)  v = ReduceMean(q, last)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)  y = Mul(n, g8)"
    left = check_fused(weighted(f"{LIKE} {{ {text} }}"), FEEDS[LIKE], {"RMSNormalization": 1})
    assert left == ["RMSNormalization"]


def test_softmax_in_pieces() -> None:
    text = "t = ReduceMax(x, last)  d = Sub(x, t)  e = Exp(d)  s = ReduceSum(e, last)  y = Div(e, s)"
    assert check_fused(weighted(f"{LIKE} {{ {text} }}"), FEEDS[LIKE], {"softmax": 1}) == ["Softmax"]


CONV = {
    "bias": ("c = Conv<pads = [1, 1, 1, 1]>(x, w)  y = Add(c, d4)", "conv"),
    "affine": ("c = Conv(x, w, b4)  m = Mul(c, c4)  a = Sub(m, half)  y = Div(a, d4)", "conv"),
    "reversed": ("c = Conv(x, w, b4)  m = Sub(c4, c)  n = Neg(m)  y = Mul(two, n)", "conv"),
    "norm": ("c = Conv(x, w)  y = BatchNormalization(c, scale, b4, mean, var)", "conv"),
    "norm, relu": ("c = Conv(x, w, b4)  n = BatchNormalization(c, scale, b4, mean, var)  y = Relu(n)", "conv+relu"),
    "relu6": ("c = Conv(x, w)  y = Clip(c, zero, six)", "conv+clip"),
    "sigmoid": ("c = Conv(x, w)  s = Add(c, c4)  y = Sigmoid(s)", "conv+sigmoid"),
    "leaky": ("c = Conv(x, w)  y = LeakyRelu<alpha = 0.2>(c)", "conv+leakyrelu"),
    "after": ("c = Conv(x, w, b4)  r = Tanh(c)  m = Mul(r, c4)  y = Add(half, m)", "conv+tanh"),
    "residual": ("c = Conv(x, w)  d = Conv(c, w1)  a = Add(d, c)  y = Relu(a)", "conv+relu"),
    "residual after": ("c = Conv(x, w)  d = Conv(c, w1, b4)  r = Relu(d)  y = Add(c, r)", "conv+relu"),
    "residual, affine": ("c = Conv(x, w)  d = Conv(c, w1, b4)  r = Add(d, c)  y = Mul(c4, r)", "conv"),
    "depthwise": ("""c = Conv(x, w)  d = Conv<group = 4, pads = [1, 1, 1, 1]>(c, dw)  k = Mul(d, c4)
        y = HardSwish(k)""", "conv+hardswish"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONV)
def test_convolutions_take_what_follows(name: str) -> None:
    text, pattern = CONV[name]
    left = check_fused(weighted(f"{IMAGE} {{ {text} }}"), FEEDS[IMAGE], {pattern: 1})
    assert set(left) == {"Conv"}


TRANSPOSED = {
    "affine, relu": "c = ConvTranspose<strides = [2, 2]>(x, wt, b6)  a = Mul(c, c61)  b = Add(a, neg)  y = Relu(b)",
    "groups": "c = ConvTranspose<group = 2, pads = [1, 1, 0, 0]>(x, wtg)  a = Div(c, c61)  y = Relu(a)",
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_take_what_follows(name: str) -> None:
    proto = weighted(f"{BEHIND} {{ {TRANSPOSED[name]} }}")
    assert check_fused(proto, FEEDS[SMALL], {"convtranspose+relu": 1}) == ["ConvTranspose"]


def test_two_added_convolutions_are_two_ops() -> None:
    text = "c = Conv(x, w)  d = Conv(x, w, b4)  a = Add(c, d)  y = Relu(a)"
    assert check_fused(weighted(f"{IMAGE} {{ {text} }}"), FEEDS[IMAGE], {"conv+relu": 1}) == ["Conv", "Conv"]


APART = {
    "two readers": ("c = Conv(x, w)  r = Relu(c)  y = Mul(r, c)", ["Conv", "Chain"]),
    "along another axis": ("c = Conv<pads = [0, 1, 0, 2]>(x, w)  y = Add(c, b4)", ["Conv", "Add"]),
    "a factor per image": (
        "c = Conv(x, w)  g = GlobalAveragePool(c)  y = Mul(c, g)", ["Conv", "GlobalAveragePool", "Mul"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_is_read_elsewhere_or_spread_otherwise_stays(name: str) -> None:
    text, kinds = APART[name]
    feeds = {"x": RNG.normal(0, 1, (1, 3, 6, 3 if "another" in name else 5)).astype(np.float32)}
    assert check_fused(weighted(f"{IMAGE} {{ {text} }}"), feeds) == kinds


def test_a_result_of_the_model_is_kept() -> None:
    text = IMAGE.replace("y)", "y, float[N, 4, P, Q] c)") + " { c = Conv(x, w)  y = Relu(c) }"
    assert check_fused(weighted(text), FEEDS[IMAGE], {}) == ["Conv", "Relu"]


FORWARD = {
    "scale": "a = Mul(x, c4)  y = Conv<pads = [1, 1, 1, 1]>(a, w4)",
    "scale with holes": "a = Mul(x, holes)  y = Conv<pads = [1, 1, 1, 1]>(a, w4)",
    "affine, no pads": "a = Mul(x, holes)  b = Add(a, d4)  y = Conv(b, w4)",
    "affine, pads": "a = Mul(x, c4)  b = Sub(d4, a)  y = Conv<pads = [1, 2, 1, 0]>(b, w4, b6)",
    "depthwise": "a = Mul(x, c4)  b = Add(a, d4)  y = Conv<pads = [1, 1, 1, 1], group = 4>(b, dw)",
    "norm, groups": "a = BatchNormalization(x, scale, b4, mean, var)  y = Conv<group = 2, pads = [1, 1, 1, 1]>(a, wg)",
    "number": 'a = Sub(x, half)  y = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(a, w4)',
}


@pytest.mark.parametrize("name", FORWARD)
def test_convolutions_take_affine_operators_before_them(name: str) -> None:
    assert check_fused(weighted(f"{BEHIND} {{ {FORWARD[name]} }}"), FEEDS[SMALL], {"forward": 1}) == ["Conv"]


def test_affine_operators_behind_one_activation_go_into_the_next_convolution() -> None:
    text = "a = Conv(x, w1)  b = Relu(a)  c = Mul(b, c4)  d = Add(c, neg)  y = Conv<pads = [1, 1, 1, 1]>(d, w4)"
    proto = weighted(f"{BEHIND} {{ {text} }}")
    assert check_fused(proto, FEEDS[SMALL], {"conv+relu": 1, "forward": 1}) == ["Conv", "Conv"]
    with compiled(proto, "all") as (_, program, _unit):
        first, second = program.code.top.ops
        assert len(first.inputs) == 2  # neither scale nor shift
        assert len(second.inputs) == 7  # up to the value to pad with


def test_a_convolution_takes_what_stands_before_it_and_gives_what_stands_behind_it() -> None:
    text = """a = Conv(x, w1)  b = Relu(a)  c = Add(b, c4)  d = Conv<pads = [1, 1, 1, 1], group = 4>(c, dw)  e = Tanh(d)
        f = Mul(e, half)  g = Sub(f, d4)  y = Conv<pads = [1, 1, 1, 1]>(g, w4)"""
    left = check_fused(weighted(f"{BEHIND} {{ {text} }}"), FEEDS[SMALL], {"conv+relu": 1, "conv+tanh": 1, "forward": 2})
    assert left == ["Conv"] * 3


def test_one_channel_that_a_constant_spreads_over_all_stays_one() -> None:
    proto = weighted("""agraph (float[N, 1, H, W] x) => (float[N, 6, P, Q] y) {
        a = Mul(x, c4)  y = Conv(a, w4) }""")
    assert check_fused(proto, {"x": FEEDS[SMALL]["x"][:, :1]}, {}) == ["Mul", "Conv"]


def test_affine_operators_stay_where_no_value_to_pad_with_gives_zeros() -> None:
    text = "a = Mul(x, holes)  b = Add(a, d4)  y = Conv<pads = [1, 1, 1, 1]>(b, w4)"
    assert check_fused(weighted(f"{BEHIND} {{ {text} }}"), FEEDS[SMALL], {"chain": 1}) == ["Chain", "Conv"]


def test_a_view_between_a_convolution_and_its_activation() -> None:
    proto = weighted(
        """agraph (float[N, 3, 3, 5] x) => (float[N, 4, Q] y) {
        c = Conv(x, w)  s = Squeeze(c, axis2)  a = Add(s, e4)  y = Tanh(a) }""",
        {"e4": RNG.normal(0, 1, (1, 4, 1)).astype(np.float32)},
    )
    feeds = {"x": RNG.normal(0, 1, (2, 3, 3, 5)).astype(np.float32)}
    assert check_fused(proto, feeds, {"conv+tanh": 1}) == ["Conv", "Squeeze"]


MATMUL = {
    "bias": ("c = MatMul(x, m)  y = Add(b6, c)", "matmul"),
    "bias of two axes": ("c = MatMul(x, m)  y = Add(c, c6)", "matmul"),
    "bias, gelu": ("c = MatMul(x, m)  x1 = Add(c, b6)  y = Gelu(x1)", "matmul+gelu"),
    "factor": ("c = MatMul(x, m)  f = Mul(c, half)  y = Add(f, b6)", "matmul"),
    "per column": ("c = MatMul(x, m)  a = Add(c, b6)  d = Div(a, c6)  r = Relu(d)  y = Mul(r, b6)", "matmul+relu"),
    "quotient": ("c = MatMul(x, m)  f = Div(c, three)  y = Tanh(f)", "matmul+tanh"),
}


@pytest.mark.parametrize("name", MATMUL)
def test_matrix_products_take_what_follows(name: str) -> None:
    text, pattern = MATMUL[name]
    assert check_fused(weighted(f"{ROWS} {{ {text} }}"), FEEDS[ROWS], {pattern: 1}) == ["MatMul"]


@pytest.mark.parametrize(("transposed", "weights"), [(0, "m"), (1, "mt")])
def test_gemm_takes_what_follows(transposed: int, weights: str) -> None:
    proto = weighted(f"""agraph (float[N, 8] x) => (float[N, 6] y) {{
        c = Gemm<transB = {transposed}, alpha = 0.5>(x, {weights}, b6)  s = Mul(c, c6)  y = Sigmoid(s) }}""")
    assert check_fused(proto, {"x": FEEDS[ROWS]["x"][0]}, {"gemm+sigmoid": 1}) == ["MatMul"]


def test_transposed_and_scaled_operands() -> None:
    proto = weighted("""agraph (float[B, H, S, 8] q, float[B, H, T, 8] k) => (float[B, H, S, T] y) {
        a = Mul(q, half)  t = Transpose<perm = [0, 1, 3, 2]>(k)  b = Div(t, three)  p = MatMul(a, b)
        y = Add(p, neg) }""")
    q, k = (RNG.normal(0, 1, (2, 3, n, 8)).astype(np.float32) for n in (4, 5))
    assert check_fused(proto, {"q": q, "k": k}, {"matmul+operands": 1, "matmul": 1}) == ["MatMul"]


SOFTMAX = {
    "factor": ("a = Mul(x, half)  y = Softmax(a)", "softmax+factor"),
    "mask": ("a = Add(x, b8)  b = Div(a, three)  c = Add(b, x)  y = Softmax<axis = -1>(c)", "softmax+mask"),
    "guard": ("""m = Log(x)  a = Add(x, m)  s = Softmax(a)  n = IsNaN(s)  y = Where(n, zero, s)""", "softmax+guard"),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_takes_what_stands_around_it(name: str) -> None:
    text, pattern = SOFTMAX[name]
    x = np.abs(FEEDS[LIKE]["x"])
    x[0, 1] = 0  # its logarithm masks all of a row
    with compiled(weighted(f"{LIKE} {{ {text} }}"), "all") as (_, program, _unit):
        assert program.fused[pattern] == 1
    assert check_fused(weighted(f"{LIKE} {{ {text} }}"), {"x": x})[-1] == "Softmax"


def test_a_bias_before_a_softmax_goes_into_the_product() -> None:
    text = "c = MatMul(x, m)  a = Add(c, b6)  y = Softmax(a)"
    assert check_fused(weighted(f"{ROWS} {{ {text} }}"), FEEDS[ROWS], {"matmul": 1}) == ["MatMul", "Softmax"]


def test_keys_that_are_transposed_by_reshapes() -> None:
    proto = weighted("""agraph (float[B, 3, S, 8] q, float[B, 3, T, 8] k) => (float[B, 3, S, T] y)
        <int64[1] m1 = {-1}, int64[1] m2 = {-2}, int64[1] lo = {-9223372036854775808},
         int64[1] hi = {9223372036854775807}> {
        s = Shape(k)  n = Slice(s, m1, hi)  t = Slice(s, m2, m1)  b = Slice(s, lo, m2)
        s3 = Concat<axis = 0>(m1, t, n)  r = Reshape(k, s3)  p = Transpose<perm = [0, 2, 1]>(r)
        s4 = Concat<axis = 0>(b, n, t)  kt = Reshape(p, s4)  y = MatMul(q, kt) }""")
    q, k = (RNG.normal(0, 1, (2, 3, n, 8)).astype(np.float32) for n in (4, 5))
    assert check_fused(proto, {"q": q, "k": k}, {"transposed keys": 1, "matmul+operands": 1}) == ["MatMul"]


def test_one_hot_rows_are_looked_up() -> None:
    table = RNG.normal(0, 1, (5, 3)).astype(np.float32)
    proto = weighted(
        """agraph (int64[N, 4] x) => (float[N, 4, 3] y) { u = Unsqueeze(x, last)  e = Equal(u, rows)
            c = Cast<to = 1>(e)  y = MatMul(c, table) }""",
        {"table": table},
    )
    x = np.array([[0, 4, 2, 1], [5, -1, 3, 2**62]])  # what is no row is zeros
    assert check_fused(proto, {"x": x}, {"lookup": 1}) == ["Unsqueeze", "Lookup"]


def test_what_is_done_to_each_row_is_done_to_the_table() -> None:
    extra = {
        "table": RNG.normal(0, 1, (5, 6)).astype(np.float32),
        "row": WEIGHTS["b6"].reshape(1, 1, 6).astype(np.float32),
    }
    proto = weighted(
        """agraph (int64[N, 4, 1] x) => (float[N, 4, 6] y) { e = Equal(rows, x)  c = Cast<to = 1>(e)
            p = MatMul(c, table)  q = Add(p, row)  y = Tanh(q) }""",
        extra,
    )
    x = np.array([[0, 4, 2, 1], [5, -1, 3, 2]])[..., None]
    assert check_fused(proto, {"x": x}, {"lookup": 3}) == ["Lookup"]


CHAINS = {
    "tree": "a = Exp(x)  b = Abs(x)  c = Add(a, b)  d = Sqrt(b)  y = Mul(c, d)",
    "row constants": "a = Mul(x, g8)  b = Add(a, b8)  c = Max(b, half, x)  y = Pow(c, two)",
    "clips": "a = Clip(x, neg)  b = Clip(a, , two)  c = LeakyRelu<alpha = 0.3>(b)  y = HardSigmoid(c)",
    "one operand": "a = Max(x)  b = Sum(a)  c = Exp(b)  y = Neg(c)",
    "one and itself": "a = Add(x, x)  y = Mul(a, a)",
}


@pytest.mark.parametrize("name", CHAINS)
def test_elementwise_trees_are_one_op(name: str) -> None:
    assert check_fused(weighted(f"{LIKE} {{ {CHAINS[name]} }}"), FEEDS[LIKE]) == ["Chain"]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, 3.0, -0.5])
def test_powers_in_a_chain_are_those_of_the_operator(exponent: float) -> None:
    x = np.array([-np.inf, -2, -0.0, 0, 0.3, 4, np.inf, np.nan], np.float32)
    proto = weighted(
        "agraph (float[N] x) => (float[N] y) { a = Sub(x, zero)  y = Pow(a, exponent) }",
        {"exponent": np.array(exponent, np.float32)},
    )
    assert check_fused(proto, {"x": x}) == ["Chain"]


def test_what_is_computed_once_per_row_does_not_join() -> None:
    text = "r = ReduceMean(x, last)  s = Sigmoid(r)  t = Exp(s)  a = Mul(x, t)  y = Add(a, x)"
    left = check_fused(weighted(f"{LIKE} {{ {text} }}"), FEEDS[LIKE], {"chain": 2})
    assert left == ["ReduceMean", "Chain", "Chain"]


CLEAN = {
    "identities": "a = Identity(x)  b = Cast<to = 1>(a)  c, m = Dropout(b)  d = Clip(c)  y = Softsign(d)",
    "all of it": "a = Slice(x, flat0, ends, axes)  y = Softsign(a)",
    "turned back": """a = Transpose<perm = [1, 2, 0]>(x)  b = Transpose<perm = [2, 0, 1]>(a)  y = Softsign(b)""",
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_hands_its_input_on_is_left_out(name: str) -> None:
    extra = {"flat0": np.array([0, 0]), "ends": np.array([2**31 - 1, 8]), "axes": np.array([1, 2])}
    assert check_fused(weighted(f"{LIKE} {{ {CLEAN[name]} }}", extra), FEEDS[LIKE]) == ["Softsign"]


HANDED_ON = {
    "result": ("a = Exp(x)  y = Identity(a)", ["Exp"]),
    "result that is read": ("a = Exp(x)  y = Identity(a)  z = Softsign(a)", ["Exp", "Softsign"]),
    "two results": ("a = Exp(x)  y = Identity(a)  z = Identity(a)", ["Exp", "Identity"]),
    "result of both": ("z = Exp(x)  y = Identity(z)", ["Exp", "Identity"]),
    "input": ("y = Identity(x)", ["Identity"]),
    "turned": ("a = Exp(x)  b = Transpose<perm = [0, 2, 1]>(a)  y = Transpose<perm = [0, 2, 1]>(b)", ["Exp"]),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_result_is_made_by_who_makes_its_source(name: str) -> None:
    text, kinds = HANDED_ON[name]
    outputs = LIKE.replace("y)", "y, float[N, M, 8] z)") if "z = " in text else LIKE
    assert check_fused(weighted(f"{outputs} {{ {text} }}"), FEEDS[LIKE]) == kinds


def test_constants_are_made_once_and_pruned() -> None:
    text = "t = Transpose(mt)  k = Mul(t, half)  p = MatMul(x, k)  z = Shape(p)  y = Add(p, b6)"
    assert check_fused(weighted(f"{ROWS} {{ {text} }}"), FEEDS[ROWS], {"matmul": 1}) == ["MatMul"]


# --- what fused ops are called ---------------------------------------------------------------------------------------


def test_bodies_are_fused_and_captures_are_kept() -> None:
    proto = weighted("""agraph (float[N, M, 8] x, bool c) => (float[N, M, 6] y, float[N, M, 6] z) {
        p = MatMul(x, m)  q = Add(p, b6)  z = Relu(q)
        y = If(c) <then_branch = yes () => (float[N, M, 6] a) { u = Mul(p, half)  a = Add(u, p) },
                   else_branch = no () => (float[N, M, 6] b) { v = Exp(q)  b = Identity(v) }> }""")
    for branch in (True, False):
        feeds = {**FEEDS[ROWS], "c": np.array(branch)}
        check_fused(proto, feeds, {"chain": 1, "identity": 1})


def test_a_constant_that_cannot_be_made_is_no_matter_where_nobody_asks_for_it() -> None:
    proto = weighted(
        """agraph (float[N, M, 8] x, bool c) => (float[K] y) {
        y = If(c) <then_branch = yes () => (float[A] a) { a = Reshape(x, flat1) },
            else_branch = no () => (float[B] b) { r = Reshape(m, seven)  s = Mul(x, r)  b = Reshape(s, flat1) }> }""",
        {"flat1": np.array([-1]), "seven": np.array([7])},
    )
    with compiled(proto, "all") as (_, program, unit):
        x = FEEDS[ROWS]["x"]
        np.testing.assert_array_equal(Bound(program, unit, {"x": x, "c": np.array(True)}).run()[0], x.ravel())
        with pytest.raises(KernelError, match="Reshape"):
            Bound(program, unit, {"x": x, "c": np.array(False)}).run()


LARGER = {
    "product": ("float[A, 8] x, float[B, C] r", "a = MatMul(x, m) b = Add(a, r) y = Relu(b)", (1, 8), (5, 6)),
    "scaled": ("float[A, 8] x, float[B, C] r", "a = MatMul(x, m) b = Mul(a, half) y = Add(b, r)", (1, 8), (3, 6)),
    "image": (
        "float[N, 3, H, W] x, float[A, B, C, D] r",
        "a = Conv(x, w, b4) b = Mul(a, c4) c = Add(r, b) y = Relu(c)", (1, 3, 3, 3), (2, 4, 5, 4),
    ),
    "transposed": (
        "float[N, 4, H, W] x, float[A, B, C, D] r",
        "a = ConvTranspose(x, wt) y = Add(a, r)", (1, 4, 1, 1), (3, 6, 2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGER)
def test_a_residual_that_turns_out_larger_than_the_product(name: str) -> None:
    inputs, nodes, *shapes = LARGER[name]
    outputs = ", ".join("EFGI"[: len(shapes[1])])
    proto = weighted(f"agraph ({inputs}) => (float[{outputs}] y) {{ {nodes} }}")
    feeds = {key: RNG.normal(0, 2, shape).astype(np.float32) for key, shape in zip("xr", shapes, strict=True)}
    assert len(check_fused(proto, feeds)) == 1


@pytest.mark.parametrize("columns", [1, 8])
def test_an_axis_of_unknown_length_may_be_spread_by_the_scale_of_a_normalization(columns: int) -> None:
    proto = weighted("""agraph (float[A, B] x) => (float[C, D] y) { m1 = ReduceMean(x, last) d = Sub(x, m1)
        s = Pow(d, two) v = ReduceMean(s, last) e = Add(v, eps) q = Sqrt(e) n = Div(d, q) g = Mul(n, g8)
        y = Add(g, b8) }""")
    check_fused(proto, {"x": RNG.normal(0, 2, (3, columns)).astype(np.float32)})


def test_errors_and_spans_name_the_main_node() -> None:
    proto = weighted(f"{IMAGE} {{ c = Conv(x, w)  n = BatchNormalization(c, scale, b4, mean, var)  y = HardSwish(n) }}")
    proto.graph.node[0].name, proto.graph.node[1].name, proto.graph.node[2].name = "conv", "norm", "act"
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "C"
    with compiled(proto, "all") as (_, program, unit):
        (op,) = program.code.top.ops
        assert op.origin.name == "conv"
        assert [node.name for node in op.fused] == ["norm", "act"]
        assert op.label == "ai.onnx::Conv+BatchNormalization+HardSwish"
        with pytest.raises(KernelError, match=r"node conv \(ai.onnx::Conv.*into which norm, act were fused") as caught:
            Bound(program, unit, {"x": np.zeros((1, 2, 5, 5), np.float32)})
        assert caught.value.node == "conv"


def test_levels_below_all_fuse_nothing() -> None:
    proto = weighted(f"{LIKE} {{ {GELU['halves x']} }}")
    for level in ("none", "basic"):
        with compiled(proto, level) as (provider, program, _):
            assert len(program.code.top.ops) == 5
            assert provider.stats()["fused"] == {}


def test_the_domain_of_fused_ops_is_no_models() -> None:
    proto = model("agraph (float[N] x) => (float[N] y) { y = outrider.Chain(x) }", outrider=1)
    (offer,) = offers(proto)
    assert isinstance(offer, Decline)
    assert "this provider's own" in offer.reason
