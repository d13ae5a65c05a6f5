"""Activations that exporters write in small pieces, as the operators of ONNX that they are. Within tolerance.

    x * clip(x + 3, 0, 6) / 6, x * hard_sigmoid(x), in any order of factors     HardSwish
    clip(a * x + b, 0, h) / h                                                   HardSigmoid
    x * sigmoid(a * x)                                                          Swish
    0.5 * x * (1 + erf(x / sqrt(2))), in any order of factors                   Gelu
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))                Gelu, approximate
    x * tanh(softplus(x))                                                       Mish

The argument of the inner function is compared as a polynomial in x, so its spelling does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.providers.cpu.blocks import Op
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import (
    Product,
    bounds,
    close,
    is_polynomial,
    keeps_rank,
    polynomial,
    product,
)

ROOT = math.sqrt(2 / math.pi)


def fuse_activations(draft: Draft) -> None:
    """All of them."""
    for op in draft.ops:
        if not draft.has(op) or op.step.outputs[0].dtype != "float32":
            continue
        found = product(draft, op)
        if found is None:
            continue
        if len(found.leaves) == 1:
            _hard_sigmoid(draft, found)
        elif len(found.leaves) == 2:
            for x, gate in (found.leaves, found.leaves[::-1]):
                if any(match(draft, found, x, gate) for match in _GATES):
                    break


def _replaced(
    draft: Draft, pattern: str, ops: Sequence[Op], kind: str, x: int, attributes: Mapping[str, Any] | None = None
) -> bool:
    if not keeps_rank(draft, ops, x):
        return False
    return draft.replace(pattern, ops, kind, [x], attributes, domain="", title=kind) is not None


def _hard_sigmoid(draft: Draft, found: Product) -> bool:
    clip = draft.inner(found.leaves[0], "Clip")
    limits = None if clip is None else bounds(draft, clip)
    if clip is None or limits is None or limits[0] != 0 or not close(found.constant * limits[1], 1):
        return False
    ops = [*found.ops, clip]
    before = draft.inner(clip.inputs[0], "Add", "Sub", "Mul", "Div")
    x = clip.inputs[0]
    while before is not None and sum(draft.is_constant(number) for number in before.inputs) == 1:
        x = next(number for number in before.inputs if not draft.is_constant(number))
        before = draft.inner(x, "Add", "Sub", "Mul", "Div")
    line = polynomial(draft, clip.inputs[0], x, ops)
    if line is None or not set(line) <= {0, 1}:
        return False
    alpha, beta = line.get(1, 0.0) * found.constant, line.get(0, 0.0) * found.constant
    attributes = {"alpha": alpha, "beta": beta}
    return _replaced(draft, "hard-sigmoid", ops, "HardSigmoid", x, attributes)


def _hard_swish(draft: Draft, found: Product, x: int, gate: int) -> bool:
    ops = list(found.ops)
    sigmoid = draft.inner(gate, "HardSigmoid")
    clip = draft.inner(gate, "Clip")
    if sigmoid is not None and sigmoid.inputs[0] == x:
        alpha, beta = sigmoid.step.attributes.get("alpha", 0.2), sigmoid.step.attributes.get("beta", 0.5)
        taken = close(found.constant, 1) and close(alpha, 1 / 6) and close(beta, 0.5)
        ops.append(sigmoid)
    elif clip is not None:
        limits = bounds(draft, clip)
        ops.append(clip)
        line = polynomial(draft, clip.inputs[0], x, ops)
        # clip(x + 3, 0, 6) / 6 may be scaled inside or outside of the clip.
        taken = limits is not None and limits[0] == 0 and close(limits[1] * found.constant, 1)
        taken = taken and is_polynomial(line, {1: 1 / (6 * found.constant), 0: 1 / (2 * found.constant)})
    else:
        return False
    return taken and _replaced(draft, "hard-swish", ops, "HardSwish", x)


def _swish(draft: Draft, found: Product, x: int, gate: int) -> bool:
    sigmoid = draft.inner(gate, "Sigmoid")
    if sigmoid is None or not close(found.constant, 1):
        return False
    ops = [*found.ops, sigmoid]
    line = polynomial(draft, sigmoid.inputs[0], x, ops)
    if line is None or set(line) != {1}:
        return False
    return _replaced(draft, "swish", ops, "Swish", x, {"alpha": line[1]})


def _gelu(draft: Draft, found: Product, x: int, gate: int) -> bool:
    ops = list(found.ops)
    inner = gate
    while True:  # down to erf or tanh, through its affine form
        op = draft.inner(inner, "Add", "Mul", "Div", "Erf", "Tanh")
        if op is None:
            return False
        if op.step.op_type in ("Erf", "Tanh"):
            break
        kept = [number for number in op.inputs if draft.scalar(number) is None]
        if len(kept) != 1:
            return False
        inner = kept[0]
    line = polynomial(draft, gate, inner, ops)
    half = 0.5 / found.constant if found.constant else math.nan
    if not is_polynomial(line, {0: half, 1: half}):
        return False
    ops.append(op)
    exact = op.step.op_type == "Erf"
    argument = polynomial(draft, op.inputs[0], x, ops)
    if not is_polynomial(argument, {1: math.sqrt(0.5)} if exact else {1: ROOT, 3: ROOT * 0.044715}):
        return False
    return _replaced(draft, "gelu", ops, "Gelu", x, {"approximate": "none" if exact else "tanh"})


def _mish(draft: Draft, found: Product, x: int, gate: int) -> bool:
    tanh = draft.inner(gate, "Tanh")
    softplus = None if tanh is None else draft.inner(tanh.inputs[0], "Softplus")
    if tanh is None or softplus is None or softplus.inputs[0] != x or not close(found.constant, 1):
        return False
    return _replaced(draft, "mish", [*found.ops, tanh, softplus], "Mish", x)


_GATES: tuple[Callable[[Draft, Product, int, int], bool], ...] = (_hard_swish, _swish, _gelu, _mish)


def activation_of(draft: Draft, op: Op) -> tuple[str, float, float] | None:
    """(name, alpha, beta) of an activation as the epilogue of a product takes it (`outrider::Conv`)."""
    if op.step.domain:
        return None
    kind, attributes = op.step.op_type, op.step.attributes
    if kind == "Clip":
        limits = bounds(draft, op)
        return None if limits is None else ("Clip", *limits)
    if kind == "LeakyRelu":
        return kind, float(attributes.get("alpha", 0.01)), 0.0
    if kind == "HardSigmoid":
        return kind, float(attributes.get("alpha", 0.2)), float(attributes.get("beta", 0.5))
    if kind == "Elu":
        return kind, float(attributes.get("alpha", 1.0)), 0.0
    if kind == "Swish":
        return "Silu", float(attributes.get("alpha", 1.0)), 0.0
    if kind == "Gelu":
        return ("GeluTanh" if attributes.get("approximate", "none") == "tanh" else "Gelu"), 0.0, 0.0
    return (kind, 0.0, 0.0) if kind in ("Relu", "HardSwish", "Sigmoid", "Tanh") else None
