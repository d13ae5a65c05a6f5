"""Conditions and counts of control flow: one element, of any rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.providers.cpu.blocks import Block, Op
from outrider.providers.wire.failures import fail


def branch_of(op: Op, condition: Any) -> Block:
    """The body of an If that a condition selects."""
    try:
        return op.bodies["then_branch" if truth(condition, "the condition") else "else_branch"]
    except Exception as cause:
        fail((op.origin,), op.step.inputs, [condition], cause)


def single(item: Any, what: str) -> Any:
    """The element of an array that has one; ValueError naming `what` for anything else."""
    if not isinstance(item, np.ndarray) or item.size != 1:
        shape = item.shape if isinstance(item, np.ndarray) else type(item).__name__
        raise ValueError(f"{what} must be one number, its shape is {shape}")
    return item.reshape(())[()]


def truth(item: Any, what: str) -> bool:
    """`single`, for booleans only (TypeError)."""
    value = single(item, what)
    if item.dtype != np.bool_:
        raise TypeError(f"{what} must be bool, it is {item.dtype}")
    return bool(value)
