"""What a failed node raises."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from outrider.providers.contract import KernelError
from outrider.providers.cpu.blocks import Op
from outrider.providers.wire.dtypes import onnx_name
from outrider.shm import memory
from outrider.shm.errors import OutOfMemoryError, OutriderError


def fail(op: Op, inputs: Sequence[Any], cause: Exception) -> NoReturn:
    """Raise Outrider's own errors as they are, short memory as OutOfMemoryError, the rest as KernelError."""
    if isinstance(cause, OutriderError):
        raise cause
    origin = op.origin
    if isinstance(cause, MemoryError):
        raise OutOfMemoryError(
            f"node {origin.name} ({origin.label}) ran out of memory: {cause}; use smaller inputs",
            value=origin.name, available=memory.available_bytes(),
        ) from cause  # fmt: skip
    described = [
        (value.name, *_describe(value.dtype, item))
        for value, item in zip(op.step.inputs, [*inputs, *[None] * len(op.step.inputs)])  # noqa: B905 (padded)
    ]
    listed = ", ".join(
        f"{name or '(omitted)'}: {dtype}{'' if shape is None else list(shape)}" for name, dtype, shape in described
    )
    reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    raise KernelError(
        f"node {origin.name} ({origin.label}, opset {origin.opset}) failed: {reason}; "
        f"its inputs were {listed or 'none'}",
        provider="cpu", node=origin.name, op=origin.label, opset=origin.opset, inputs=described, cause=reason,
        remote_traceback="".join(traceback.format_exception(cause)),
    ) from cause  # fmt: skip


def _describe(declared: str, item: Any) -> tuple[str, tuple[int, ...] | None]:
    """(dtype, shape) of what arrived; `declared` where it is not a tensor."""
    if not isinstance(item, np.ndarray):
        return declared, None
    try:
        return onnx_name(item.dtype), item.shape
    except ValueError:
        return str(item.dtype), item.shape
