"""Types of what the com.microsoft operators make, which ONNX's inference does not know.

For inference alone, each such node becomes a call of a small function of standard operators that makes values of the
same dtypes, and of the same shapes where that is easily said. Whoever infers sees the original node again afterwards.

The bodies are ONNX text: inputs are i0, i1, ..., outputs o0, o1, ... What a body leaves out stays unknown. Source: the
type and shape inference that ONNX Runtime's documentation of contributed operators states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import onnx
import onnx.parser
from onnx import helper

from outrider.scheduler.skeleton import walk

STAND_IN = "outrider.types"  # the domain of the functions
DOMAIN = "com.microsoft"

_Attributes = Mapping[str, Any]


def _window(attributes: _Attributes) -> str:
    """The attributes of a convolution or pooling, as text."""
    parts = []
    for name in ("dilations", "kernel_shape", "pads", "strides"):
        if name in attributes:
            parts.append(f"{name} = [{', '.join(map(str, attributes[name]))}]")
    for name in ("group", "ceil_mode"):
        if name in attributes:
            parts.append(f"{name} = {attributes[name]}")
    if "auto_pad" in attributes:
        parts.append(f'auto_pad = "{attributes["auto_pad"].decode()}"')
    return f"<{', '.join(parts)}>" if parts else ""


def _unshaped(source: str, dtype: str, output: str) -> str:
    """A value of the dtype of `dtype` and of unknown rank."""
    a, b, c, d = (f"{name}_{output}" for name in "abcd")
    return f"""{a} = NonZero({source}) {b} = Constant<value_ints = [-1]>() {c} = Reshape({a}, {b})
        {d} = CastLike({source}, {dtype}) {output} = Reshape({d}, {c})"""


def _last_channels(attributes: _Attributes, body: str, dtype: str) -> str:
    """`body`, unless channels come last."""
    return _unshaped("i0", dtype, "o0") if attributes.get("channels_last") else body


def _fused_matmul(node: onnx.NodeProto, a: _Attributes) -> str:
    if any(a.get(name) for name in ("transA", "transB", "transBatchA", "transBatchB")):
        return _unshaped("i0", "i0", "o0")
    return "o0 = MatMul(i0, i1)"


def _fused_gemm(node: onnx.NodeProto, a: _Attributes) -> str:
    return f"o0 = Gemm<transA = {a.get('transA', 0)}, transB = {a.get('transB', 0)}>(i0, i1)"


def _q_gemm(node: onnx.NodeProto, a: _Attributes) -> str:
    dtype = "i8" if len(node.input) > 8 and node.input[8] else "i1"
    return f"""x = CastLike(i0, i1) w = CastLike(i3, i1)
        y = Gemm<transA = {a.get("transA", 0)}, transB = {a.get("transB", 0)}>(x, w) o0 = CastLike(y, {dtype})"""


def _lstm(node: onnx.NodeProto, a: _Attributes) -> str:
    kept = [f"hidden_size = {a['hidden_size']}"] if "hidden_size" in a else []
    kept += [f'direction = "{a["direction"].decode()}"'] if "direction" in a else []
    attributes = f"<{', '.join(kept)}>" if kept else ""
    return f"w = CastLike(i1, i0) r = CastLike(i2, i0) o0, o1, o2 = LSTM{attributes}(i0, w, r)"


def _embed(node: onnx.NodeProto, a: _Attributes) -> str:
    return """o0 = Gather(i2, i0) o2 = Identity(o0) k = Constant<value_ints = [1]>() d = ReduceSum<keepdims = 0>(i0, k)
        o1 = Cast<to = 6>(d)"""


def _n_bits(node: onnx.NodeProto, a: _Attributes) -> str:
    return f"""s = Constant<value_ints = [{a["K"]}, {a["N"]}]>() z = ConstantOfShape(s) w = CastLike(z, i0)
        o0 = MatMul(i0, w)"""


def _q_concat(node: onnx.NodeProto, a: _Attributes) -> str:
    values = ", ".join(f"i{i}" for i in range(2, len(node.input), 3))
    return f"o0 = Concat<axis = {a['axis']}>({values})"


def _pool(node: onnx.NodeProto, a: _Attributes) -> str:
    return _last_channels(a, f"o0 = AveragePool{_window(a)}(i0)", "i0")


def _global_pool(node: onnx.NodeProto, a: _Attributes) -> str:
    return _last_channels(a, "o0 = GlobalAveragePool(i0)", "i0")


def _q_conv(node: onnx.NodeProto, a: _Attributes) -> str:
    return _last_channels(a, f"y = Conv{_window(a)}(i0, i3) o0 = CastLike(y, i7)", "i7")


def _same(node: onnx.NodeProto, a: _Attributes) -> str:
    return "o0 = Identity(i0)"


def _skip(node: onnx.NodeProto, a: _Attributes) -> str:
    return "o0 = Identity(i0) o3 = Identity(i0)"


def _fixed(body: str) -> Callable[[onnx.NodeProto, _Attributes], str]:
    return lambda node, a: body


RULES: Mapping[str, Callable[[onnx.NodeProto, _Attributes], str]] = {
    **dict.fromkeys(("BiasGelu", "Gelu", "FastGelu", "QuickGelu", "QLinearSigmoid", "QLinearLeakyRelu"), _same),
    **dict.fromkeys(("QLinearSoftmax", "RotaryEmbedding", "BiasSoftmax", "BiasAdd", "BiasDropout"), _same),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _fixed("o0 = Add(i0, i3)")),
    "Attention": lambda node, a: _unshaped("i0", "i0", "o0") + _unshaped("i0", "i0", "o1"),
    "DequantizeLinear": _fixed("o0 = CastLike(i0, i1)"),
    "DynamicQuantizeLSTM": _lstm,
    "DynamicQuantizeMatMul": _fixed("w = CastLike(i1, i0) o0 = MatMul(i0, w)"),
    "EmbedLayerNormalization": _embed,
    "FusedConv": lambda node, a: f"o0 = Conv{_window(a)}(i0, i1)",
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "MatMulIntegerToFloat": _fixed("x = CastLike(i0, i2) w = CastLike(i1, i2) o0 = MatMul(x, w)"),
    "MatMulNBits": _n_bits,
    "MultiHeadAttention": lambda node, a: _unshaped("i0", "i0", "o0"),
    "QAttention": lambda node, a: _unshaped("i0", "i2", "o0") + _unshaped("i0", "i2", "o1"),
    "QGemm": _q_gemm,
    "QLinearAveragePool": _pool,
    "QLinearConcat": _q_concat,
    "QLinearConv": _q_conv,
    "QLinearGlobalAveragePool": _global_pool,
    "QLinearWhere": _fixed("o0 = Where(i0, i1, i4)"),
    "QuantizeLinear": lambda node, a: "o0 = CastLike(i0, i2)" if len(node.input) > 2 else "o0 = Cast<to = 2>(i0)",
}


class Original(NamedTuple):
    """What a node was before a function stood in for it."""

    domain: str
    op_type: str


def stand_in(model: onnx.ModelProto) -> dict[str, Original]:
    """Give the nodes of contributed operators functions that stand in for them. Returns full name -> what it was."""
    originals: dict[str, Original] = {}
    names: dict[tuple[str, int, int], str] = {}
    own = {(function.domain, function.name) for function in model.functions}
    for node in walk(model.graph):
        rule = RULES.get(node.op_type) if node.domain == DOMAIN else None
        if rule is None or (node.domain, node.op_type) in own:
            continue
        body = rule(node, {one.name: helper.get_attribute_value(one) for one in node.attribute})
        key = (body, len(node.input), len(node.output))
        if key not in names:
            names[key] = f"F{len(names)}"
            model.functions.append(_function(names[key], *key))
        originals[node.name] = Original(node.domain, node.op_type)
        node.domain, node.op_type = STAND_IN, names[key]
    return originals


def restore(model: onnx.ModelProto, originals: Mapping[str, Original]) -> None:
    """Undo `stand_in`."""
    if not originals:
        return
    for node in walk(model.graph):
        if node.domain == STAND_IN:
            node.domain, node.op_type = originals[node.name]
    kept = [function for function in model.functions if function.domain != STAND_IN]
    del model.functions[:]
    model.functions.extend(kept)


def _function(name: str, body: str, inputs: int, outputs: int) -> onnx.FunctionProto:
    formals = ", ".join(f"i{i}" for i in range(inputs))
    results = ", ".join(f"o{i}" for i in range(outputs))
    head = f'<opset_import: ["" : 21], domain: "{STAND_IN}"> {name} ({formals}) => ({results})'
    function: onnx.FunctionProto = onnx.parser.parse_function(f"{head} {{ {body} }}")
    return function
