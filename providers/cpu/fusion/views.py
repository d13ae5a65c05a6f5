"""Squeeze and Unsqueeze between a convolution and what its epilogue takes go behind it. Bit-equal.

Conv -> Squeeze -> affine or activation     Conv -> affine or activation -> Squeeze
"""

from __future__ import annotations

from functools import partial

import numpy as np

from outrider.providers.cpu.blocks import Op
from outrider.providers.cpu.fusion.activations import activation_of
from outrider.providers.cpu.fusion.affine import step_of
from outrider.providers.cpu.fusion.draft import Draft


def sink_views(draft: Draft) -> None:
    """Those of spatial axes."""
    for op in draft.ops:
        if op.step.domain == "" and op.step.op_type in ("Squeeze", "Unsqueeze") and _spatial(draft, op):
            while _sunk(draft, op):
                pass


def _spatial(draft: Draft, op: Op) -> bool:
    """True for a view of a convolution that keeps its first two axes."""
    axes = draft.ints(op.inputs[1]) if len(op.inputs) > 1 else None
    ranks = draft.rank(op.inputs[0]), draft.rank(op.outputs[0])
    if draft.inner(op.inputs[0], "Conv") is None or axes is None or None in ranks:
        return False
    rank = max(rank or 0 for rank in ranks)
    return min(ranks[0] or 0, ranks[1] or 0) > 2 and all(axis % rank >= 2 for axis in axes)


def _sunk(draft: Draft, view: Op) -> bool:
    """The op behind the view stands before it now."""
    after = draft.reader(view.outputs[0])
    shape = draft.shape(view.inputs[0])
    if after is None or shape is None or len(after.outputs) != 1 or after.step.op_type == "BatchNormalization":
        return False
    features = shape[1] if isinstance(shape[1], int) else None
    step = step_of(draft, after, view.outputs[0], features, 1, draft.rank(view.outputs[0]))
    if step is None and activation_of(draft, after) is None:
        return False
    column = (features or 1, *[1] * (len(shape) - 2))
    inputs = []
    for number in after.inputs:
        if number == view.outputs[0]:
            number = view.inputs[0]
        elif step is not None and not step.single:
            number = draft.derived(f"column of {after.origin.name}", column, partial(np.reshape, shape=column), number)
        elif step is not None and draft.rank(number):
            number = draft.derived(f"number of {after.origin.name}", (), partial(np.reshape, shape=()), number)
        inputs.append(number)
    draft.exchange(view, after, inputs)
    return True
