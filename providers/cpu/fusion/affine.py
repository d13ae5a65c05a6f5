"""Affine operators per feature on the way from a product to an activation, as one factor and one offset.

    Mul, Div, Add, Sub by a constant of one element or of one per feature, Neg, BatchNormalization in inference

The constants are looked at when the derived weights are first asked for; arithmetic is float64, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.fusion.draft import Draft
from outrider.providers.cpu.fusion.expressions import other


@dataclass(frozen=True)
class Step:
    """One operator: what it does with which constants. `single`: they have one element each.

    `kind`: `Mul`, `Div`, `Add`, `Sub`, `From` (constant - x), `Neg`, or `Norm` for BatchNormalization.
    """

    kind: str
    numbers: tuple[int, ...] = ()
    single: bool = True
    epsilon: float = 0.0

    @property
    def multiplies(self) -> bool:
        """False for what only adds."""
        return self.kind not in ("Add", "Sub")


@dataclass(frozen=True)
class Affine:
    """y = factor * x + offset, each [features], as steps in order."""

    features: int
    steps: tuple[Step, ...] = field(default=())

    def then(self, step: Step) -> Affine:
        """With one step more."""
        return Affine(self.features, (*self.steps, step))

    @property
    def multiplies(self) -> bool:
        """False where the factor is 1."""
        return any(step.multiplies for step in self.steps)

    @property
    def single(self) -> bool:
        """True where the factor is the same for all features."""
        return all(step.single for step in self.steps if step.multiplies)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The constants that `values` takes, in order."""
        return tuple(number for step in self.steps for number in step.numbers)

    def values(self, constants: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(factor, offset) in float64, [features] each, from the contents of `numbers`."""
        factor, offset = np.ones(self.features), np.zeros(self.features)
        given = iter([np.asarray(one, np.float64).reshape(-1) for one in constants])
        for step in self.steps:
            taken = [next(given) for _ in step.numbers]
            if step.kind == "Norm":
                scale, bias, mean, variance = taken
                by = scale / np.sqrt(variance + step.epsilon)
                factor, offset = factor * by, (offset - mean) * by + bias
            elif step.kind == "Mul":
                factor, offset = factor * taken[0], offset * taken[0]
            elif step.kind == "Div":
                factor, offset = factor / taken[0], offset / taken[0]
            elif step.kind in ("Add", "Sub"):
                offset = offset + (taken[0] if step.kind == "Add" else -taken[0])
            else:  # From, Neg
                factor, offset = -factor, (taken[0] if taken else 0.0) - offset
        return factor, np.broadcast_to(offset, self.features)


def step_of(draft: Draft, op: Op, x: int, features: int | None, axis: int, rank: int | None) -> Step | None:
    """The step that an op is on `x`, whose axis `axis` counts the features; None for anything else.

    `features` None: only constants of one element. `rank` None: only those without axes.
    """
    kind = op.step.op_type
    if op.step.domain or not op.inputs:
        return None
    if kind == "Neg":
        return Step("Neg")
    if kind == "BatchNormalization":
        return _norm(draft, op, x, features, axis, rank)
    if kind not in ("Mul", "Div", "Add", "Sub") or op.inputs[0] == op.inputs[1]:
        return None
    constant = other(op, x)
    if not draft.is_constant(constant) or draft.dtype(constant) != "float32":
        return None
    found = per_feature(draft.shape(constant), features, axis, rank)
    if found is None or (kind == "Div" and op.inputs[0] == constant):
        return None
    if kind == "Sub" and op.inputs[0] == constant:
        kind = "From"
    return Step(kind, (constant,), found == 1)


def _norm(draft: Draft, op: Op, x: int, features: int | None, axis: int, rank: int | None) -> Step | None:
    constants = op.inputs[1:]
    channels = axis == 1 or (rank is not None and axis + rank == 1)
    plain = op.inputs[0] == x and channels and not op.step.attributes.get("training_mode", 0)
    unused = all(number == ABSENT or not draft.reads(number) for number in op.outputs[1:])
    if not plain or not unused or rank is None or features is None or not all(map(draft.is_constant, constants)):
        return None
    if any(draft.shape(number) != (features,) or draft.dtype(number) != "float32" for number in constants):
        return None
    return Step("Norm", tuple(constants), False, float(op.step.attributes.get("epsilon", 1e-5)))


def per_feature(shape: Sequence[int] | None, features: int | None, axis: int, rank: int | None) -> int | None:
    """How many elements a constant of this shape has, 1 or one per feature, if it is spread over the features of `axis`
    and does not make the result larger; else None.
    """
    if shape is None or len(shape) > (0 if rank is None else rank):
        return None
    size = int(np.prod(shape, dtype=np.int64))
    if size == 1:
        return 1
    at = axis if axis < 0 else axis - (rank or 0)
    return size if size == features and len(shape) >= -at and shape[at] == features else None
