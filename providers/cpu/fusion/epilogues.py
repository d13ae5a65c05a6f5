"""What follows a convolution or a matrix product, into its kernel. Within tolerance.

    Conv | ConvTranspose | MatMul | Gemm
      -> affine per feature (`affine.py`)     into weights and bias
      -> + residual                           in the epilogue, before the activation
      -> activation (`activations.py`)        in the epilogue
      -> affine per feature                   in the epilogue: scale and shift
      -> + residual                           in the epilogue, after the activation

Each part may be missing; every value in between has one reader. A residual is a value of the same rank that is not
known to be smaller or larger. Where the weights are no constants, a factor stays with the product: one number, and for
matrices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.claims import OWN
from outrider.providers.cpu.fusion.activations import activation_of
from outrider.providers.cpu.fusion.affine import Affine, step_of
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import other


@dataclass(frozen=True)
class Source:
    """A product. `features` along `axis` of its output of `rank`; `along`: the axis of the weights that counts them,
    within each of the `groups` that their first axis consists of.

    `bias`: a constant [features] or [1], or ABSENT. `factor`: of the product.
    """

    op: Op
    op_type: str
    attributes: dict[str, Any]
    x: int
    weights: int
    bias: int
    features: int | None
    axis: int
    rank: int | None
    along: int
    factor: float = 1.0
    pattern: str = ""
    groups: int = 1
    more: tuple[int, ...] = ()  # what follows the inputs of the epilogue, for integers, whose weights stay as they are


@dataclass(frozen=True)
class Tail:
    """What is taken after a product: `before` and `after` the activation."""

    ops: tuple[Op, ...]
    before: Affine
    after: Affine
    activation: tuple[str, float, float] | None = None
    residual: int = ABSENT
    where: str = ""


def fuse_products(draft: Draft) -> None:
    """All of them. The last one first: of two whose results are added, the later takes the other's as its residual."""
    for op in reversed(draft.ops):
        source = source_of(draft, op) if draft.has(op) and op.step.outputs[0].dtype == "float32" else None
        if source is None:
            continue
        for tail in reversed(_tails(draft, source)):
            if _fused(draft, source, tail):
                break


def source_of(draft: Draft, op: Op) -> Source | None:
    """The product that an op is."""
    if draft.own(op.outputs[0], "IntegerMatMul", "IntegerConv") is not None:
        return _integers(draft, op)
    own = op.step.domain == OWN and op.step.op_type == "MatMul" and "residual" not in op.step.attributes
    if not own and (op.step.domain or op.step.op_type not in ("Conv", "ConvTranspose", "MatMul", "Gemm")):
        return None
    attributes = dict(op.step.attributes)
    x, weights, bias = (*op.inputs, ABSENT)[:3]
    shape = draft.shape(weights)
    if shape is None or (bias != ABSENT and not draft.is_constant(bias)):
        return None
    if op.step.op_type == "Conv":
        constant = draft.is_constant(weights)
        features = shape[0] if constant else None
        return Source(op, "Conv", attributes, x, weights, bias, features, 1, len(shape), 0, pattern="conv")
    if op.step.op_type == "ConvTranspose":
        groups = int(attributes.get("group", 1))
        features = shape[1] * groups if draft.is_constant(weights) else None
        return Source(
            op, "ConvTranspose", attributes, x, weights, bias, features, 1, len(shape), 1,
            pattern="convtranspose", groups=groups,
        )  # fmt: skip
    if op.step.op_type == "MatMul":
        rank = draft.rank(op.outputs[0])
        rank = len(shape) - 1 if rank is None else rank  # at least
        along = -2 if attributes.get("transB", 0) else -1
        features = shape[along] if len(shape) > 1 and isinstance(shape[along], int) else None
        factor = float(attributes.get("factor", 1.0))
        return Source(op, "MatMul", attributes, x, weights, ABSENT, features, -1, rank, along, factor, "matmul")
    return _gemm(draft, op, x, weights, bias, shape)


def _integers(draft: Draft, op: Op) -> Source | None:
    """A product of integers without an epilogue of its own yet."""
    x, weights, bias, *rest = op.inputs
    shape = draft.shape(weights)
    if shape is None or "residual" in op.step.attributes:
        return None
    conv = op.step.op_type == "IntegerConv"
    along = 0 if conv else -1
    features = shape[along] if isinstance(shape[along], int) else None
    rank = len(shape) if conv else draft.rank(op.outputs[0]) or 1
    return Source(
        op, op.step.op_type, dict(op.step.attributes), x, weights, bias, features, 1 if conv else -1, rank, along,
        pattern="integer conv" if conv else "integer matmul", more=tuple(rest[3:]),
    )  # fmt: skip


def _gemm(draft: Draft, op: Op, x: int, weights: int, bias: int, shape: Sequence[Any]) -> Source | None:
    get = op.step.attributes.get
    along = 0 if get("transB", 0) else 1
    features = shape[along] if isinstance(shape[along], int) else None
    attributes = {key: int(get(key, 0)) for key in ("transA", "transB")}
    if bias != ABSENT:
        given = draft.shape(bias)
        if get("beta", 1.0) != 1 or given not in ((features,), (1, features), (1,), ()):
            return None
        if given not in ((features,), (1,)):
            bias = draft.derived("bias of Gemm", (int(given[-1] or 1) if given else 1,), np.ravel, bias)
    factor = float(get("alpha", 1.0))
    return Source(op, "MatMul", attributes, x, weights, bias, features, -1, 2, along, factor, pattern="gemm")


def _tails(draft: Draft, source: Source) -> list[Tail]:
    """What can be taken, from little to much."""
    tail = Tail((), Affine(source.features or 1), Affine(source.features or 1))
    found: list[Tail] = []
    number = source.op.outputs[0]
    while True:
        op = draft.reader(number)
        longer = None if op is None else _longer(draft, source, tail, op, number)
        if op is None or longer is None:
            return found
        found.append(longer)
        tail, number = longer, op.outputs[0]


def _longer(draft: Draft, source: Source, tail: Tail, op: Op, number: int) -> Tail | None:
    if tail.where == "after" or op.step.outputs[0].dtype != "float32":
        return None
    ops = (*tail.ops, op)
    step = step_of(draft, op, number, source.features, source.axis, source.rank)
    if step is not None:
        if tail.activation is not None or tail.where:
            return replace(tail, ops=ops, after=tail.after.then(step))
        movable = (draft.is_constant(source.weights) and not source.more) or not step.multiplies
        if not movable and (source.op_type != "MatMul" or not step.single):
            return None
        return replace(tail, ops=ops, before=tail.before.then(step))
    activation = activation_of(draft, op)
    if activation is not None:
        if tail.activation is not None or tail.after.steps:
            return None
        return replace(tail, ops=ops, activation=activation)
    if op.step.domain or op.step.op_type != "Add" or tail.residual != ABSENT:
        return None
    residual = other(op, number)
    if draft.dtype(residual) != "float32" or not alike(draft.shape(number), draft.shape(residual)):
        return None
    where = "before" if tail.activation is None and not tail.after.steps else "after"
    return replace(tail, ops=ops, residual=residual, where=where)


def alike(a: Sequence[Any] | None, b: Sequence[Any] | None) -> bool:
    """True for shapes of one rank where no dim is known to be another."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(
        one == two or (one != 1 and two != 1 and not (isinstance(one, int) and isinstance(two, int)))
        for one, two in zip(a, b, strict=True)
    )


def _fused(draft: Draft, source: Source, tail: Tail) -> bool:
    weights, bias, factor = _folded(draft, source, tail.before)
    scale, shift = _scaled(draft, source, tail.after)
    attributes = dict(source.attributes)
    if source.op_type == "MatMul":
        attributes["factor"] = factor
    attributes["residual"] = tail.where
    if tail.activation is not None:
        attributes["activation"], attributes["alpha"], attributes["beta"] = tail.activation
    inputs = [source.x, weights, bias, tail.residual, scale, shift, *source.more]
    pattern = source.pattern + ("+" + tail.activation[0].lower() if tail.activation else "")
    return draft.replace(pattern, (source.op, *tail.ops), source.op_type, inputs, attributes) is not None


def _folded(draft: Draft, source: Source, affine: Affine) -> tuple[int, int, float]:
    """(weights, bias, factor) with what comes before the activation."""
    weights, bias, factor = source.weights, source.bias, source.factor
    if not affine.steps:
        return weights, bias, factor
    name = source.op.origin.name
    numbers = affine.numbers
    if affine.multiplies and draft.is_constant(weights):
        shape = draft.shape(weights) or ()
        column = [source.groups, *[1] * len(shape)]
        column[source.along % len(shape) + 1] = affine.features // source.groups
        grouped = (source.groups, shape[0] // source.groups, *shape[1:])

        def scaled(w: np.ndarray, *constants: np.ndarray) -> np.ndarray:
            factor = affine.values(constants)[0].reshape(column)
            product: np.ndarray = np.multiply(w.reshape(grouped), factor, dtype=np.float64)
            return product.reshape(shape)

        weights = draft.derived(f"weights of {name}", shape, scaled, weights, *numbers)
    elif affine.multiplies:
        factor *= float(affine.values([draft.value(number) for number in numbers])[0][0])
    if bias == ABSENT and not any(step.kind not in ("Mul", "Div", "Neg") for step in affine.steps):
        return weights, bias, factor

    def shifted(*constants: np.ndarray) -> np.ndarray:
        given = 0.0 if bias == ABSENT else constants[0].astype(np.float64)
        by, offset = affine.values(constants if bias == ABSENT else constants[1:])
        return np.asarray(given * by + offset)

    numbers = numbers if bias == ABSENT else (bias, *numbers)
    return weights, draft.derived(f"bias of {name}", (affine.features,), shifted, *numbers), factor


def _scaled(draft: Draft, source: Source, affine: Affine) -> tuple[int, int]:
    """(scale, shift) of what comes after the activation."""
    if not affine.steps:
        return ABSENT, ABSENT
    name, size = source.op.origin.name, (affine.features,)
    scale = shift = ABSENT
    if affine.multiplies:
        scale = draft.derived(f"scale of {name}", size, lambda *given: affine.values(given)[0], *affine.numbers)
    if any(step.kind not in ("Mul", "Div", "Neg") for step in affine.steps):
        shift = draft.derived(f"shift of {name}", size, lambda *given: affine.values(given)[1], *affine.numbers)
    return scale, shift
