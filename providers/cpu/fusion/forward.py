"""What stands before a convolution, into its weights. Within tolerance; borders as they were.

    affine per channel (`affine.py`) -> Conv              weights and bias
    scale and shift of a fused Conv -> Conv               the same

Zeros that a convolution pads with stand behind the affine operators: conv(k x + s) pads x with -s / k instead, which
`outrider::Conv` takes as its input `pad`. So k may be 0 nowhere if there are pads and an s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.providers.cpu.blocks import ABSENT, Op
from outrider.providers.cpu.claims import OWN
from outrider.providers.cpu.fusion.affine import Affine, Step, step_of
from outrider.providers.cpu.fusion.draft import Draft

_BIAS, _SCALE, _SHIFT, _PAD = 2, 4, 5, 6  # inputs of `outrider::Conv`


@dataclass(frozen=True)
class Before:
    """`affine` of `x`, made by `ops` that go, or by a convolution that keeps all but its scale and shift."""

    x: int
    affine: Affine
    ops: tuple[Op, ...] = ()
    producer: Op | None = None


def fuse_forward(draft: Draft) -> None:
    """All convolutions."""
    for op in draft.ops:
        kind = op.step.op_type == "Conv" and op.step.domain in ("", OWN) and op.step.outputs[0].dtype == "float32"
        if kind and draft.has(op) and len(op.inputs) <= _PAD and all(map(draft.is_constant, op.inputs[1:2])):
            before = _before(draft, op)
            if before is not None:
                _folded(draft, op, before)


def _before(draft: Draft, op: Op) -> Before | None:
    shape, group = draft.shape(op.inputs[1]), int(op.step.attributes.get("group", 1))
    if shape is None:
        return None
    channels = shape[1] * group
    x, steps, ops = op.inputs[0], list[Step](), list[Op]()
    while True:
        maker = draft.inner(x)
        sources: list[int] = (
            [] if maker is None else [n for n in maker.inputs if n != ABSENT and not draft.is_constant(n)]
        )
        step = None
        if maker is not None and len(sources) == 1:
            step = step_of(draft, maker, sources[0], channels, 1, len(shape))
        if maker is None or step is None:
            break
        steps.insert(0, step)
        ops.append(maker)
        x = sources[0]
    if ops:
        whole = draft.shape(x)  # a constant may have spread one channel over all
        if whole is None or len(whole) != len(shape) or whole[1] != channels:
            return None
        return Before(x, Affine(channels, tuple(steps)), tuple(ops))
    producer = draft.own(x, "Conv")
    if producer is None or draft.reads(x) != 1 or producer.step.attributes.get("residual") == "after":
        return None
    scale, shift = [*producer.inputs, *[ABSENT] * _PAD][_SCALE : _SHIFT + 1]
    steps += [Step(name, (n,)) for name, n in (("Mul", scale), ("Add", shift)) if n != ABSENT]
    return Before(x, Affine(channels, tuple(steps)), producer=producer) if steps else None


def _folded(draft: Draft, op: Op, before: Before) -> None:
    affine, group = before.affine, int(op.step.attributes.get("group", 1))
    shape = draft.shape(op.inputs[1]) or ()
    factor, offset = affine.values([draft.value(number) for number in affine.numbers])
    padded = any(op.step.attributes.get("pads", ())) or op.step.attributes.get("auto_pad", "NOTSET") not in (
        "NOTSET", "VALID",
    )  # fmt: skip
    padded = padded and bool(offset.any())
    if not np.isfinite([factor, offset]).all() or (padded and not factor.all()):
        return
    name, numbers = op.origin.name, affine.numbers
    spread = (group, shape[0] // group, *shape[1:])
    column = (group, 1, shape[1], *[1] * (len(shape) - 2))

    def scaled(w: np.ndarray, *constants: np.ndarray) -> np.ndarray:
        made: np.ndarray = w.reshape(spread) * affine.values(constants)[0].reshape(column)
        return made.reshape(shape)

    def shifted(w: np.ndarray, *constants: np.ndarray) -> np.ndarray:
        bias = constants[len(numbers)] if len(constants) > len(numbers) else 0.0
        terms = w.reshape(spread) * affine.values(constants[: len(numbers)])[1].reshape(column)
        added: np.ndarray = terms.sum(axis=tuple(range(2, len(spread)))).reshape(-1) + bias
        return added

    inputs = [*op.inputs, *[ABSENT] * (_PAD + 1 - len(op.inputs))]
    inputs[0] = before.x
    inputs[1] = draft.derived(f"weights of {name}", shape, scaled, op.inputs[1], *numbers)
    if offset.any():
        given = (inputs[_BIAS],) if inputs[_BIAS] != ABSENT else ()
        inputs[_BIAS] = draft.derived(f"bias of {name}", shape[:1], shifted, op.inputs[1], *numbers, *given)
    if padded:
        inputs[_PAD] = draft.derived(f"padding of {name}", (affine.features,), lambda: -offset / factor)
    attributes = {"residual": "", **op.step.attributes}
    made = draft.replace("forward", [op, *before.ops], "Conv", inputs, attributes)
    if made is not None and before.producer is not None:
        kept = [ABSENT if i in (_SCALE, _SHIFT) else number for i, number in enumerate(before.producer.inputs)]
        draft.replace("", [before.producer], "Conv", kept, before.producer.step.attributes)
