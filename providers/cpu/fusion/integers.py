"""Products of 8-bit integers: what quantization tools write around them, into their kernels.

    MatMulInteger | ConvInteger [-> + int32 bias] -> Cast -> * (x_scale * w_scale)  within tolerance
    DequantizeLinear of 8-bit integers -> MatMul | Gemm | Conv with dequantized constants  within tolerance
        -> IntegerMatMul | IntegerConv, float32; what follows becomes its epilogue (`epilogues.py`)
    IntegerMatMul | IntegerConv -> QuantizeLinear -> DequantizeLinear             bit-equal
        -> the same, which rounds its product to what 8 bits hold before the epilogue
    IntegerMatMul | IntegerConv -> QuantizeLinear                                 bit-equal
        -> the same, with 8-bit integers as result
    QuantizeLinear -> DequantizeLinear with the same scale and zero point         bit-equal
        -> ImitateQuantization

The sums of the integers are exact, where those of their float32 images are rounded at each step. A product of two
activations stays as it is: to pack one of them in each run costs more than integers gain (attention of 64 tokens:
3.6 ms instead of 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import other
from outrider.providers.cpu.kernels.epilogue import BIAS
from outrider.providers.cpu.kernels.integers import BYTES, P_SCALE, P_ZERO, SUM_BIAS, Y_SCALE, Y_ZERO

_NOTHING = (ABSENT,) * 3  # residual, scale, shift


@dataclass(frozen=True)
class Operand:
    """An 8-bit integer tensor with the numbers of its scale and zero point."""

    number: int
    scale: int
    zero: int


def fuse_integer_products(draft: Draft) -> None:
    """Products that give float32; before constants that are dequantized are folded."""
    for op in draft.ops:
        if not draft.has(op) or op.step.domain:
            continue
        if op.step.op_type in ("MatMulInteger", "ConvInteger"):
            _scaled(draft, op)
        elif op.step.op_type in ("MatMul", "Gemm", "Conv"):
            _dequantized(draft, op)


def fuse_roundings(draft: Draft) -> None:
    """QuantizeLinear and DequantizeLinear after a product; before products get their epilogues."""
    draft.sweep()
    for op in draft.ops:
        if draft.has(op) and op.step.domain == "" and op.step.op_type == "DequantizeLinear":
            _rounded(draft, op)


def fuse_quantized_results(draft: Draft) -> None:
    """QuantizeLinear after a product, and before DequantizeLinear; when products have their epilogues."""
    for op in draft.ops:
        if draft.has(op) and op.step.domain == "" and op.step.op_type == "QuantizeLinear":
            _quantized(draft, op)
    draft.sweep()
    for op in draft.ops:
        if draft.has(op) and op.step.domain == "" and op.step.op_type == "DequantizeLinear":
            _imitated(draft, op)


def _single(draft: Draft, number: int) -> bool:
    """True for a tensor of one element."""
    if draft.maker(number, "DynamicQuantizeLinear") is not None:
        return True
    shape = draft.shape(number)
    return shape is not None and all(dim == 1 for dim in shape)


def _inputs(x: Operand, w: Operand, bias: int = ABSENT) -> list[int]:
    return [x.number, w.number, bias, *_NOTHING, x.scale, x.zero, w.scale, w.zero]


def _optional(op: Op, i: int) -> int:
    return op.inputs[i] if i < len(op.inputs) else ABSENT


# The sums of an operator of integers, scaled -------------------------------------------------------------------------
def _scaled(draft: Draft, op: Op) -> None:
    """MatMulInteger or ConvInteger, if Cast and Mul follow."""
    added = draft.reader(op.outputs[0])
    ops, number, bias = [op], op.outputs[0], ABSENT
    if added is not None and added.step.domain == "" and added.step.op_type == "Add":
        bias = _sum_bias(draft, op, other(added, number))
        if bias == ABSENT:
            return
        ops, number = [op, added], added.outputs[0]
    cast = draft.reader(number)
    if cast is None or cast.step.domain or cast.step.op_type != "Cast" or cast.step.outputs[0].dtype != "float32":
        return
    scaled = draft.reader(cast.outputs[0])
    if scaled is None or scaled.step.domain or scaled.step.op_type != "Mul":
        return
    weights = draft.shape(op.inputs[1])
    if weights is None or len(weights) < 2:
        return
    conv = op.step.op_type == "ConvInteger"
    scales = _scales(draft, other(scaled, cast.outputs[0]), None if conv else weights[-1])
    zeros = _optional(op, 2), _optional(op, 3)
    if scales is None or not (zeros[0] == ABSENT or _single(draft, zeros[0])):
        return
    x, w = (Operand(op.inputs[i], scales[i], zeros[i]) for i in range(2))
    kind, attributes = ("IntegerConv", op.step.attributes) if conv else ("IntegerMatMul", {})
    inputs = _inputs(x, w)
    if bias != ABSENT:
        inputs += [*(ABSENT,) * (SUM_BIAS - len(inputs)), bias]
    draft.replace("integer " + ("conv" if conv else "matmul"), [*ops, cast, scaled], kind, inputs, attributes)


def _sum_bias(draft: Draft, op: Op, number: int) -> int:
    """The int32 value [features] that is added to the sums of a convolution as [1, features, 1, ...]; or ABSENT."""
    weights, reshape = draft.shape(op.inputs[1]), draft.maker(number, "Reshape")
    if op.step.op_type != "ConvInteger" or weights is None or reshape is None:
        return ABSENT
    source, target = reshape.inputs
    column = draft.ints(target)
    fits = column is not None and column[1] == -1 and [*column[:1], *column[2:]] == [1] * (len(weights) - 1)
    return source if fits and draft.shape(source) == weights[:1] else ABSENT


def _scales(draft: Draft, number: int, features: Any) -> tuple[int, int] | None:
    """The scales of x (one value) and w (one, or one per feature if they are known) whose product a value is."""
    product = draft.maker(number, "Mul")
    if product is None:
        return None
    first, second = product.inputs
    for x, w in ((first, second), (second, first)):
        by_column = features is not None and draft.shape(w) == (features,)
        if _single(draft, x) and (_single(draft, w) or by_column):
            return x, w
    return None


# A product of what is dequantized ------------------------------------------------------------------------------------
def _operand(draft: Draft, number: int, axis: int | None) -> Operand | None:
    """What a DequantizeLinear to float32 makes a value of; scales along `axis`, None: one for the tensor."""
    op = draft.maker(number, "DequantizeLinear")
    if op is None or op.step.outputs[0].dtype != "float32" or draft.dtype(op.inputs[0]) not in BYTES:
        return None
    if int(op.step.attributes.get("block_size", 0)):
        return None
    found = Operand(op.inputs[0], op.inputs[1], _optional(op, 2))
    if draft.dtype(found.scale) != "float32":
        return None
    if _single(draft, found.scale):
        return found if found.zero == ABSENT or _single(draft, found.zero) else None
    rank = draft.rank(found.number)
    if axis is None or rank is None or int(op.step.attributes.get("axis", 1)) % rank != axis % rank:
        return None
    size = (draft.shape(found.number) or ())[axis % rank]
    fits = draft.shape(found.scale) == (size,) and (found.zero == ABSENT or draft.shape(found.zero) == (size,))
    return found if fits else None


def _dequantized(draft: Draft, op: Op) -> None:
    kind, get = op.step.op_type, op.step.attributes.get
    turned = kind == "Gemm" and bool(get("transB", 0))
    x = _operand(draft, op.inputs[0], None)
    w = _operand(draft, op.inputs[1], 0 if turned or kind == "Conv" else -1)
    if x is None or w is None:
        return
    shape = draft.shape(w.number)
    if shape is None or not draft.is_constant(w.number):
        return
    bias = _optional(op, 2)
    if kind == "Conv":
        if bias != ABSENT and (not _constant(draft, bias) or draft.shape(bias) != shape[:1]):
            return
        draft.replace("integer conv", [op], "IntegerConv", _inputs(x, w, bias), op.step.attributes)
        return
    if kind == "MatMul":
        if len(shape) > 1:
            draft.replace("integer matmul", [op], "IntegerMatMul", _inputs(x, w))
        return
    if int(get("transA", 0)) or float(get("alpha", 1.0)) != 1 or float(get("beta", 1.0)) != 1 or len(shape) != 2:
        return
    features = shape[0 if turned else 1]
    if bias != ABSENT:
        if not _constant(draft, bias) or draft.shape(bias) not in ((features,), (1, features), (1,), ()):
            return
        given = draft.shape(bias)
        size = (int(given[-1]),) if given else (1,)
        bias = draft.derived(f"bias of {op.origin.name}", size, np.ravel, bias)
    if turned:
        dtype = np.dtype(draft.dtype(w.number))
        number = draft.derived(f"weights of {op.origin.name}", shape[::-1], np.transpose, w.number, dtype=dtype)
        w = Operand(number, w.scale, w.zero)
    draft.replace("integer gemm", [op], "IntegerMatMul", _inputs(x, w, bias))


def _constant(draft: Draft, number: int) -> bool:
    """A constant, or one that is still to be dequantized: it is made one."""
    if draft.is_constant(number):
        return True
    op = draft.maker(number, "DequantizeLinear")
    if op is None or not all(map(draft.is_constant, op.reads)):
        return False
    draft.fold(op)
    return True


# Quantized results ---------------------------------------------------------------------------------------------------
def _per_tensor(draft: Draft, op: Op) -> bool:
    """A QuantizeLinear or DequantizeLinear with one scale and a zero point that is given."""
    given = len(op.inputs) > 2 and op.inputs[2] != ABSENT and not int(op.step.attributes.get("block_size", 0))
    return given and _single(draft, op.inputs[1]) and _single(draft, op.inputs[2])


def _extended(op: Op) -> list[int]:
    """All inputs of an own product."""
    return [*op.inputs, *(ABSENT,) * (SUM_BIAS + 1 - len(op.inputs))]


def _quantized(draft: Draft, op: Op) -> None:
    source = draft.own(op.inputs[0], "IntegerMatMul", "IntegerConv")
    if source is None or draft.reads(op.inputs[0]) != 1 or not _per_tensor(draft, op):
        return
    if op.step.outputs[0].dtype not in BYTES or draft.dtype(op.inputs[1]) != "float32":
        return
    if _optional(source, Y_SCALE) != ABSENT:
        return
    inputs = _extended(source)
    inputs[Y_SCALE : Y_ZERO + 1] = op.inputs[1:3]
    draft.replace("integer result", [source, op], source.step.op_type, inputs, source.step.attributes)


def _same(draft: Draft, one: Sequence[int], two: Sequence[int]) -> bool:
    """The same values, or small constants of the same contents."""
    for a, b in zip(one, two, strict=True):
        if a == b:
            continue
        x, y = draft.small(a), draft.small(b)
        if x is None or y is None or x.dtype != y.dtype or not np.array_equal(x, y):
            return False
    return True


def _undone(draft: Draft, op: Op) -> Op | None:
    """The QuantizeLinear that this DequantizeLinear alone undoes, both of float32."""
    source = draft.inner(op.inputs[0], "QuantizeLinear")
    if source is None or not _per_tensor(draft, op) or not _per_tensor(draft, source):
        return None
    if not _same(draft, op.inputs[1:], source.inputs[1:]):
        return None
    plain = draft.dtype(source.inputs[0]) == op.step.outputs[0].dtype == draft.dtype(op.inputs[1]) == "float32"
    return source if plain else None


def _rounded(draft: Draft, op: Op) -> None:
    rounding = _undone(draft, op)
    product = None if rounding is None else draft.own(rounding.inputs[0], "IntegerMatMul", "IntegerConv")
    if rounding is None or product is None or rounding.step.outputs[0].dtype not in BYTES:
        return
    if _optional(product, Y_SCALE) != ABSENT or _optional(product, P_SCALE) != ABSENT:
        return
    if _optional(product, BIAS) != ABSENT or draft.reads(rounding.inputs[0]) != 1:
        return
    inputs = _extended(product)
    inputs[P_SCALE : P_ZERO + 1] = rounding.inputs[1:3]
    draft.replace("integer rounding", [product, rounding, op], product.step.op_type, inputs, product.step.attributes)


def _imitated(draft: Draft, op: Op) -> None:
    source = _undone(draft, op)
    if source is None or source.step.outputs[0].dtype not in ("int8", "uint8", "int16", "uint16"):
        return
    draft.replace("imitate quantization", [source, op], "ImitateQuantization", source.inputs)
